"""Checkpoint to version, the whole job: decide, run, and publish by writing the manifest last."""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtx2vllm.converter.errors import DifferenceError, InputError
from mtx2vllm.converter.fleet.root import step_of
from mtx2vllm.converter.job import Job, plan, prepare
from mtx2vllm.converter.options import Location, Options, options_of
from mtx2vllm.converter.storage import basename, normal, parent, store_for
from mtx2vllm.converter.version.publish import Publisher
from mtx2vllm.converter.version.record import Previous

Say = Callable[[str], None]


@dataclass(frozen=True)
class Converted:
    """A finished conversion: `bytes` of weights, `peak_rss` in bytes, `nonfinite` tensors with NaN or infinity."""

    out: str
    layout: str
    family: str
    tensors: int
    bytes: int
    seconds: float
    peak_rss: int
    step: int | None
    notes: tuple[str, ...]
    nonfinite: Mapping[str, tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        """What `convert --json` prints."""
        shown = {k: getattr(self, k) for k in ("out", "layout", "family", "tensors", "bytes", "seconds", "peak_rss")}
        return {**shown, "step": self.step, "notes": list(self.notes), "nonfinite": dict(self.nonfinite)}


def convert(
    checkpoint: Location, out: Location, *, say: Say = lambda _: None, progress: Callable[[int, int], None] | None = None,
    **chosen: Any,
) -> Converted:  # fmt: skip
    """Convert a MaxText checkpoint into a version directory.

    Args:
        checkpoint: a run, a `checkpoints/` directory, a step, or its `items/`; a local path (string or `pathlib.Path`)
            or gs://.
        out: the version directory; the same.
        say: receives notes, one line each.
        progress: receives bytes written and bytes in all.
        chosen: the fields of `Options`, such as `hf_config="Qwen/Qwen3-8B", layout="hf", memory_budget="1GiB"`.

    Raises:
        InputError, UsageError, DifferenceError, Mtx2vllmError: see `converter/errors.py`. Nothing is published then, and
            nothing that existed before is lost.
    """
    checkpoint, out, options = os.fspath(checkpoint), os.fspath(out), options_of(chosen)
    started = time.monotonic()
    job = prepare(checkpoint, options)
    for note in job.notes:
        say(note)
    return carry_out(job, checkpoint, out, say=say, progress=progress, started=started)


def refuse_out(job: Job, out: str) -> None:
    """Refuse a place that a run would refuse, before anything is written.

    Raises:
        InputError: it holds a finished version or foreign files, is being written or served, or is the trainer's.
    """
    _refuse_inside(job.checkpoint.items, out)
    Publisher(out, overwrite=job.options.overwrite).check()


def carry_out(
    job: Job, checkpoint: str, out: str, *, say: Say, progress: Callable[[int, int], None] | None, started: float,
    previous: Previous | None = None,
) -> Converted:  # fmt: skip
    """Run a prepared job and publish it. `previous` is a version whose unchanged tensors are counted."""
    _refuse_inside(job.checkpoint.items, out)
    with Publisher(out, overwrite=job.options.overwrite) as publisher:
        results = publisher.run(job, progress)
        nonfinite = {job.plan.tensors[n].name: (r.nans, r.infs) for n, r in results.items() if r.nans or r.infs}
        for name, (nans, infs) in nonfinite.items():
            say(f"warning: tensor {name} holds {nans} NaN and {infs} infinite values")
        if nonfinite and job.options.strict:
            raise DifferenceError(
                f"{len(nonfinite)} tensors hold NaN or infinity ({', '.join(list(nonfinite)[:3])}); --strict publishes nothing. "
                "The checkpoint itself holds them: look at the training run"
            )
        publisher.publish(job, checkpoint, results, previous)
    return Converted(
        out=out, layout=job.plan.layout, family=job.plan.family, tensors=len(job.plan.tensors) + len(job.copies.tensors), bytes=job.nbytes,
        seconds=round(time.monotonic() - started, 3), peak_rss=peak_rss(), step=job.checkpoint.step, notes=job.notes,
        nonfinite=nonfinite,
    )  # fmt: skip


def _refuse_inside(items: str, out: str) -> None:
    """The trainer's directories are not ours to write into: what looks like a step there would be taken for one."""
    step = parent(items) if basename(items) == "items" else items
    mine, theirs = _whole(out), _whole(step)
    if mine == theirs or mine.startswith(f"{theirs}/"):
        raise InputError(f"{out} lies inside the checkpoint {step}; give an OUT outside of it")
    if parent(mine) == parent(theirs) and step_of(basename(mine)) is not None and step_of(basename(theirs)) is not None:
        raise InputError(
            f"{out} lies beside step {basename(theirs)} of the checkpoint, where the trainer would take it for a step of its "
            "own; give an OUT elsewhere"
        )


def _whole(location: str) -> str:
    local = store_for(location).local(location)
    return normal(location) if local is None else str(Path(local).resolve())


def peak_rss() -> int:
    """The largest resident size of this process so far, in bytes. Linux's ru_maxrss carries a parent's peak into its
    children, so /proc is asked first (proc(5), VmHWM)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


__all__ = ["Converted", "Options", "carry_out", "convert", "plan", "prepare", "refuse_out"]
