"""Many conversions for a release: everything is checked first, done ones are skipped, a failed one stops no other.

read_jobs -> spread (steps, layouts) -> check (metadata, OUT, disk space: all problems at once) -> convert one by one

A killed batch is run again as it was: what has its manifest, and fits, is done; what a killed conversion left behind is
cleaned by its claim.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mtx2vllm.converter.conversion import carry_out
from mtx2vllm.converter.errors import InputError, Mtx2vllmError, NotCommitted, from_os_error
from mtx2vllm.converter.fleet.batch_file import Wanted, read_jobs
from mtx2vllm.converter.fleet.follow_steps import find_steps, is_committed
from mtx2vllm.converter.hf_files import CONFIG, local_path
from mtx2vllm.converter.job import Job, Options, prepare
from mtx2vllm.converter.shards import DTYPES
from mtx2vllm.converter.storage import join, normal, store_for
from mtx2vllm.converter.version import claim as claims
from mtx2vllm.converter.version.verify import load_manifest, one_file_problems
from mtx2vllm.schemas.manifest import Manifest

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Item:
    """One conversion of a batch. `done`: its version is there already, as wanted. Sizes in bytes."""

    line: int
    checkpoint: str
    out: str
    options: Options
    nbytes: int = 0
    tensors: int = 0
    done: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one. `nonfinite` counts the tensors with NaN or infinity, None where this run read none."""

    line: int
    checkpoint: str
    step: int | None
    layout: str
    out: str
    result: Literal["converted", "done before", "failed"]
    tensors: int
    bytes: int
    seconds: float
    errors: tuple[str, ...] = ()
    nonfinite: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the version is there."""
        return self.result != "failed"

    def to_json(self) -> dict[str, Any]:
        """An entry of what `batch --json` prints."""
        return {"ok": self.ok, **asdict(self)}


def run_batch(path: str, *, say: Say = lambda _: None, progress: Progress | None = None) -> list[Outcome]:
    """Carry out a file of jobs, in its order.

    Raises:
        InputError: the file, or anything it asks for, cannot be meant; nothing has run then. What fails later is in the
            result.
    """
    items = check_batch(path)
    done = sum(item.done for item in items)
    say(f"{len(items)} conversions, {done} of them done before")
    outcomes = []
    for number, item in enumerate(items, 1):
        say(f"[{number}/{len(items)}] {item.out}{' is done' if item.done else ''}")
        outcomes.append(_carry_out(item, say, progress))
        for problem in outcomes[-1].errors:
            say(f"error: {item.out}: {problem}")
    return outcomes


def _carry_out(item: Item, say: Say, progress: Progress | None) -> Outcome:
    seen = Outcome(
        item.line, item.checkpoint, item.options.step, item.options.layout, item.out, "done before", item.tensors,
        item.nbytes, 0.0,
    )  # fmt: skip
    if item.done:
        return seen
    started = time.monotonic()
    try:
        job = prepare(item.checkpoint, item.options)
        done = carry_out(job, item.checkpoint, item.out, say=say, progress=progress, started=started)
    except InputError as error:
        problems = tuple(error.problems)
    except Mtx2vllmError as error:
        problems = (str(error),)
    except OSError as error:
        problems = (str(from_os_error(error)),)
    except Exception as error:  # a fault of ours in one job is no reason to leave out the others
        problems = (f"{type(error).__name__}: {error}; this is a fault in mtx2vllm, please report it",)
    else:
        return replace(seen, result="converted", seconds=done.seconds, nonfinite=len(done.nonfinite))
    return replace(seen, result="failed", seconds=round(time.monotonic() - started, 3), errors=problems)


def check_batch(path: str) -> list[Item]:
    """Everything that can be known before anything runs.

    Raises:
        InputError: every problem of every job, each with its line.
    """
    problems: list[str] = []
    items: list[Item] = []
    for wanted in read_jobs(path):
        try:
            spread = list(_spread(wanted))
        except (InputError, OSError) as error:
            problems += _at(path, wanted.line, error)
            continue
        for item in spread:
            try:
                items.append(_look(item))
            except (Mtx2vllmError, OSError) as error:
                problems += _at(path, item.line, error)
    problems += [f"{path}:{line}: {text}" for line, text in _collisions(items)]
    problems += [f"{path}: {text}" for text in _space(items)]
    if problems:
        raise InputError(dict.fromkeys(problems))
    return items


def _at(path: str, line: int, error: Exception) -> Iterator[str]:
    if isinstance(error, OSError):
        error = from_os_error(error)
    texts: Sequence[str] = error.problems if isinstance(error, InputError) else [str(error)]
    return (f"{path}:{line}: {text}" for text in texts)


def _spread(wanted: Wanted) -> Iterator[Item]:
    """One item for each step and layout."""
    steps: Sequence[int | None]
    if wanted.steps == "all":
        allowed = bool(wanted.settings["allow_uncommitted"])
        steps = sorted(s.step for s in find_steps(wanted.checkpoint) if is_committed(s.location, allowed))
        if not steps:
            raise InputError(f"{wanted.checkpoint} has no committed step; `steps: all` wants a run or its checkpoints/")
    else:
        steps = [None] if wanted.steps == "newest" else list(wanted.steps)
    for word, count in (("step", len(steps)), ("layout", len(wanted.layouts))):
        if count > 1 and f"{{{word}}}" not in wanted.out:
            raise InputError(f"out {wanted.out} is one place for {count} {word}s; write {{{word}}} into it")
    for step in steps:
        for layout in wanted.layouts:
            yield Item(wanted.line, wanted.checkpoint, wanted.out, wanted.options(step, layout))


def _look(item: Item) -> Item:
    """Decide the conversion from metadata, and see what is in its place already."""
    job = prepare(item.checkpoint, item.options)
    step, layout = job.checkpoint.step, item.options.layout  # "newest" is decided once, here
    if step is None and "{step}" in item.out:
        raise InputError(f"out {item.out} wants a step's number, and {item.checkpoint} has none")
    out = normal(item.out.replace("{step}", str(step)).replace("{layout}", layout))
    named = item.options.step if step is None else step
    item = replace(item, out=out, options=replace(item.options, step=named), nbytes=job.nbytes)
    item = replace(item, tensors=len(job.plan.tensors) + len(job.copies.tensors))
    return replace(item, done=_is_done(item, job))


def _is_done(item: Item, job: Job) -> bool:
    """Whether OUT holds what is wanted.

    Raises:
        InputError: it holds something else that may not be replaced.
    """
    store = store_for(item.out)
    try:
        found, _ = load_manifest(item.out)
    except NotCommitted:
        record = claims.read(store, item.out)
        stat = store.stat(join(item.out, claims.NAME))
        if record and stat and claims.is_live(record, stat.modified, time.time()):
            raise InputError(
                f"{item.out} is being written by process {record.pid} on {record.host}; wait for it"
            ) from None
        claims.refuse_foreign(store, item.out, record.files if record else ())
        return False
    other = difference(found, job, item)
    if other is None:
        damaged = [text for name in found.files for text in one_file_problems(store, item.out, name, found)]
        other = f"is damaged ({damaged[0]})" if damaged else None
    if other is None or item.options.overwrite:
        return other is None
    raise InputError(f"{item.out} {other}, so it is not done; set `overwrite: true` for this job, or give another out")


def difference(found: Manifest, job: Job, item: Item) -> str | None:
    """What tells a version from the one that a job would write, in words; None where nothing does."""
    if found.source.step != job.checkpoint.step:
        return f"holds step {found.source.step}, and this job wants step {job.checkpoint.step}"
    items, uri = local_path(job.checkpoint.items), found.source.uri
    if items != uri and not items.startswith(f"{uri.rstrip('/')}/"):
        return f"was made from {uri}, and this job's source is {item.checkpoint}"
    mine = {"layout": job.plan.layout, "family": job.plan.family, "architecture": job.plan.architecture}
    for name, value in {**mine, "dtype": item.options.dtype}.items():
        if getattr(found, name) != value:
            return f"was written with {name} {getattr(found, name)}, and this job says {value}"
    for name, value in job.plan.conventions.items():
        if not name.endswith("_chosen_by") and found.conventions.get(name) != value:
            return f"was written with {name} {found.conventions.get(name)}, and this job says {value}"
    wanted = {t.name: (DTYPES[t.dtype], t.shape) for t in (*job.plan.tensors, *job.copies.tensors)}
    if {name: (t.dtype, t.shape) for name, t in found.tensors.items()} != wanted:
        return "holds other tensors than this job writes"
    if {n for n, f in found.files.items() if f.shard} != {s.name for s in (*job.shards, *job.copy_shards)}:
        return "was split into other files (max_shard_size)"
    if job.config != _config(item.out):
        return "has another config.json than this job writes"
    return None


def _config(out: str) -> Any:
    try:
        return json.loads(store_for(out).read(join(out, CONFIG)))
    except (FileNotFoundError, ValueError):
        return None


def _collisions(items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Two conversions into one place, or one within the other."""
    places = sorted(((f"{local_path(item.out)}/", item) for item in items), key=lambda pair: pair[0])
    cover: tuple[str, Item] | None = None
    for place, item in places:
        if cover is None or not place.startswith(cover[0]):
            cover = place, item
            continue
        what = "is the place of" if place == cover[0] else "lies within the place of"
        yield item.line, f"out {item.out} {what} another conversion, that of line {cover[1].line}"


def _space(items: Sequence[Item]) -> Iterator[str]:
    """Disks that cannot hold what is still to be written to them."""
    needed: dict[int, int] = {}
    places: dict[int, Path] = {}
    for item in items:
        local = store_for(item.out).local(item.out)
        if local is None or item.done:
            continue
        place = Path(local).absolute()
        while not place.exists():
            place = place.parent
        if not os.access(place, os.W_OK):
            yield f"{place} may not be written, and {item.out} is to go there; check its owner and mode"
        device = place.stat().st_dev
        needed[device] = needed.get(device, 0) + item.nbytes
        places.setdefault(device, place)
    for device, place in places.items():
        free = shutil.disk_usage(place).free
        if needed[device] > free:
            yield f"the jobs write {needed[device]:,} bytes to the disk of {place}, where {free:,} are free; make room"
