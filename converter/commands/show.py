"""Words and tables for people, and the JSON objects for programs."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from mtx2vllm.converter.commands.sizes import size
from mtx2vllm.converter.conversion import Converted
from mtx2vllm.converter.errors import Mtx2vllmError
from mtx2vllm.converter.execute.schedule import Schedule
from mtx2vllm.converter.job import Job
from mtx2vllm.converter.plans import Plan
from mtx2vllm.converter.version.verify import Verification

_BAR_EVERY_S = 0.1
_LINE_EVERY_S = 10.0
_DIFFERING = 20  # tensors that `verify` names one by one


class Bar:
    """Progress on stderr: one moving line on a terminal, a plain line now and then otherwise."""

    def __init__(self, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._moving = enabled
        self._started = self._shown = time.monotonic()
        self._drawn = False

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._erase()

    def say(self, line: str) -> None:
        """A note, above the bar."""
        self._erase()
        self._stream.write(line + "\n")
        self._stream.flush()

    def update(self, done: int, total: int) -> None:
        """Bytes written so far and in all."""
        now = time.monotonic()
        if now - self._shown < (_BAR_EVERY_S if self._moving else _LINE_EVERY_S):
            return
        self._shown = now
        share = done / total if total else 1.0
        text = f"{share:4.0%}  {size(done)} of {size(total)}  {size(done / max(now - self._started, 1e-6))}/s"
        if self._moving:
            self._stream.write(f"\r[{'#' * int(30 * share):<30}] {text}\x1b[K")
            self._drawn = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False


def converted_text(done: Converted) -> str:
    """One line for a finished conversion."""
    step = "" if done.step is None else f" (step {done.step})"
    rate = size(done.bytes / max(done.seconds, 1e-6))
    return (
        f"{done.out}: {done.tensors} tensors, {size(done.bytes)}, {done.family}{step}, layout {done.layout}, in {done.seconds:.1f} s "
        f"({rate}/s, peak memory {size(done.peak_rss)})"
    )


def interrupted_text(out: str) -> str:
    """What an interrupted `convert` leaves behind."""
    from mtx2vllm.converter.storage import join, store_for
    from mtx2vllm.schemas.manifest import NAME

    try:
        whole = store_for(out).stat(join(out, NAME)) is not None
    except (OSError, Mtx2vllmError):
        return "interrupted"
    return f"interrupted; {out} holds a whole version" if whole else "interrupted; nothing was published"


def plan_json(made: Plan, *, full: bool = False) -> dict[str, Any]:
    """What `plan --json` prints: counts, or with `full` every tensor and leaf."""
    leaves = {m.leaf.path: m.leaf for m in made.moves}
    shown: dict[str, Any] = {
        "family": made.family,
        "architecture": made.architecture,
        "layout": made.layout,
        "tensors": len(made.tensors),
        "bytes": made.nbytes,
        "leaves": len(leaves),
    }
    if full:
        shown["conventions"] = dict(made.conventions)
        shown["tensor_list"] = [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "zero_rows": t.pad_rows} for t in made.tensors
        ]
        shown["leaf_list"] = [
            {"path": leaf.path, "shape": list(leaf.shape), "dtype": leaf.dtype, "chunk": list(leaf.chunks)}
            for leaf in leaves.values()
        ]
        shown["drops"] = [{"path": d.path, "reason": d.reason} for d in made.drops]
    return shown


def plan_text(made: Plan) -> str:
    """A plan for people: what comes out, by kind of tensor, and what is left out."""
    import re

    from rich.table import Table

    kinds: dict[tuple[str, tuple[int, ...], str], int] = {}
    for t in made.tensors:
        name = re.sub(r"experts\.\d+\.", "experts.*.", re.sub(r"layers\.\d+\.", "layers.*.", t.name))
        key = (name, t.shape, t.dtype)
        kinds[key] = kinds.get(key, 0) + 1
    table = Table("tensor", "shape", "dtype", "count", box=None, pad_edge=False)
    for (name, shape, dtype), count in kinds.items():
        table.add_row(name, str(list(shape)), dtype, str(count))
    counts = plan_json(made)
    head = (
        f"{made.architecture} ({made.family}), layout {made.layout}: {counts['tensors']} tensors, {size(made.nbytes)}, "
        f"from {counts['leaves']} leaves"
    )
    said = [f"{key}: {value}" for key, value in made.conventions.items()]
    left = [f"left out: {d.path} ({d.reason})" for d in made.drops]
    return "\n".join([head, *said, render(table).rstrip(), *left])


def job_json(job: Job, out: str) -> dict[str, Any]:
    """What `convert --dry-run --json` prints."""
    return {
        **plan_json(job.plan, full=True),
        "out": out,
        "step": job.checkpoint.step,
        "files": [{"name": s.name, "bytes": s.size} for s in job.shards],
        "needs": needs_json(job.schedule(out)),
        "side_files": sorted([*job.side, *(["config.json"] if job.config else [])]),
        "notes": list(job.notes),
    }


def job_text(job: Job, out: str) -> str:
    """A dry run for people."""
    files = [f"would write {out}/{s.name}: {size(s.size)}" for s in job.shards]
    return "\n".join([*job.notes, plan_text(job.plan), *files, needs_text(job.schedule(out)), "nothing was written"])


def needs_json(made: Schedule) -> dict[str, Any]:
    """What a run will need, in bytes, and which stacks do not fit into the budget."""
    return {
        "memory": made.memory,
        "scratch": made.scratch,
        "read": made.read,
        "written": made.written + made.spilled,
        "oversize": [
            {"leaves": list(o.leaves), "how": o.how, "bytes": o.nbytes, "why": o.reason} for o in made.oversize
        ],
    }


def needs_text(made: Schedule) -> str:
    """The same in words."""
    head = (
        f"needs {size(made.memory)} of memory and {size(made.scratch)} of scratch space, reads {size(made.read)}, writes "
        f"{size(made.written + made.spilled)}"
    )
    return "\n".join([head, *(f"  {', '.join(o.leaves)}: {o.how}: {o.reason}" for o in made.oversize)])


def inspect_json(checkpoint: str, step: int | None, allow_uncommitted: bool) -> dict[str, Any]:
    """What `inspect --json` prints; metadata only."""
    from mtx2vllm.converter.errors import InputError
    from mtx2vllm.converter.hf_files import find_config
    from mtx2vllm.converter.infer import infer
    from mtx2vllm.converter.locate import steps
    from mtx2vllm.converter.source import open_checkpoint
    from mtx2vllm.converter.storage import parent
    from mtx2vllm.schemas.model import ConfigError, schema_of

    opened = open_checkpoint(checkpoint, step, allow_uncommitted)
    source = find_config(None, checkpoint)
    try:
        family, why = (
            (schema_of(source.config).family, source.where) if source else (infer(opened.leaves)[0].family, "keys")
        )
    except (InputError, ConfigError) as error:
        family, why = None, str(error)
    leaves = sorted(opened.leaves.values(), key=lambda leaf: leaf.path)
    return {
        "items": opened.items,
        "step": opened.step,
        "steps": steps(parent(parent(opened.items)), allow_uncommitted) if opened.step is not None else [],
        "storage": {"zarr": opened.zarr, "ocdbt": opened.ocdbt},
        "family": family,
        "family_from": why,
        "parameters": sum(_count(leaf.shape) for leaf in leaves),
        "bytes": sum(leaf.nbytes for leaf in leaves),
        "leaves": [
            {"path": x.path, "key": x.key, "shape": list(x.shape), "dtype": x.dtype, "chunk": list(x.chunks)}
            for x in leaves
        ],
        "not_weights": [{"path": d.path, "reason": d.reason} for d in opened.drops],
    }


def inspect_text(found: Mapping[str, Any]) -> str:
    """A checkpoint for people."""
    from rich.table import Table

    table = Table("leaf", "shape", "dtype", "chunk", box=None, pad_edge=False)
    for leaf in found["leaves"]:
        table.add_row(leaf["path"], str(leaf["shape"]), leaf["dtype"], str(leaf["chunk"]))
    family = (
        f"family: {found['family']} (by {found['family_from']})"
        if found["family"]
        else f"family: {found['family_from']}"
    )
    storage = f"{found['storage']['zarr']}{' with OCDBT' if found['storage']['ocdbt'] else ''}"
    return "\n".join(
        [
            f"{found['items']}: step {found['step']}, {found['parameters']:,} parameters, {size(found['bytes'])}, {storage}",
            f"steps here: {', '.join(map(str, found['steps'])) or 'this one'}",
            family,
            render(table).rstrip(),
            *(f"not a weight: {d['path']} ({d['reason']})" for d in found["not_weights"]),
        ]
    )


def verification_text(found: Verification, against: str | None = None) -> str:
    """What `verify` says; the first differing tensors only, of which `--json` has all."""
    lines = [f"difference: {problem}" for problem in found.problems]
    listed = [f"{d.name}: {d.elements} of {d.of} elements, at most {d.max_abs}" for d in found.differing]
    lines += [f"difference: {line}" for line in listed[:_DIFFERING]]
    if len(listed) > _DIFFERING:
        lines.append(f"difference: and {len(listed) - _DIFFERING} more tensors; --json lists all")
    head = "verified" if found.ok else "NOT verified"
    what = "have the bytes that the manifest names" if against is None else f"are identical to those of {against}"
    return "\n".join([*lines, f"{head}: {found.identical} of {found.tensors} tensors {what}"])


def render(table: Any) -> str:
    """A rich table as text, as wide as it needs."""
    from rich.console import Console

    console = Console(width=max(120, 1) if not sys.stdout.isatty() else None, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
