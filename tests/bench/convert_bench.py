"""How fast `mtx2vllm convert` is, beside what the machine can do at best.

    python tests/bench/make_checkpoint.py CKPT
    python tests/bench/convert_bench.py CKPT [--runs 3] [--cold] [--budgets 1GiB,256MiB] [--maxtext PYTHON]

Everything is measured in one run, each in a process of its own, in turn, so that a noisy machine is noisy for all of
them; medians are printed. The tuned floor is the larger of

    decode   every chunk decoded into reused buffers, a few in flight, nothing written
    write    the same number of bytes written with the windowed writer, and fsync, nothing read

`--cold` drops the checkpoint's pages from the page cache before each measurement, otherwise they are read into it.
`--maxtext` is the Python of an environment with MaxText 0.2.5; its `to_huggingface` is measured beside us where the
checkpoint has the sizes of a model that it knows (the default of make_checkpoint.py is its qwen3-1.7b). It has the
sizes and the mappings of that model, but two of its tables leave the name out: EXPORT gives them the family's rows.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

FLIGHT = 3  # chunks in flight in the floor
WRITE = 8 << 20  # bytes a write in the floor
EXPORT = """
import runpy, sys
from maxtext.checkpoint_conversion.utils.hf_shape import HF_SHAPE
from maxtext.utils.globals import HF_IDS
model = next(word.split("=")[1] for word in sys.argv if word.startswith("model_name="))
for table in (HF_SHAPE, HF_IDS):
    table.setdefault(model, table["qwen3-0.6b"])
runpy.run_module("maxtext.checkpoint_conversion.to_huggingface", run_name="__main__")
"""
TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer"


@dataclass(frozen=True)
class Measured:
    """Seconds of wall clock and of all cores, peak resident bytes, of one process."""

    wall: float
    cpu: float
    rss: int


def measure(command: list[str], **environment: str) -> Measured:
    """Run a command to its end. Raises RuntimeError with its last words where it fails."""
    with tempfile.TemporaryFile() as words:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=words, stderr=words, env={**os.environ, **environment})
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            words.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {words.read().decode(errors='replace')[-2000:]}")
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def decode(checkpoint: str) -> None:
    """The reading floor, in this process."""
    from mtx2vllm.converter.execute.memory import keep_freed_memory

    keep_freed_memory()
    import numpy as np
    import tensorstore as ts

    from mtx2vllm.converter.execute.ring import Ring
    from mtx2vllm.converter.execute.slabs import Load, lines
    from mtx2vllm.converter.source import open_checkpoint, open_leaf

    opened = open_checkpoint(checkpoint)
    loads = [Load(leaf, box) for leaf in opened.leaves.values() for box in product(*lines(leaf))]
    buffers = [Ring(max(load.nbytes for load in loads)) for _ in range(FLIGHT)]
    memory = [buffer.take(buffer.size).data for buffer in buffers]  # type: ignore[union-attr]
    pending: list[Any] = [None] * FLIGHT
    stores = {leaf.key: open_leaf(opened, leaf) for leaf in opened.leaves.values()}
    for number, load in enumerate(loads):
        slot = number % FLIGHT
        if pending[slot]:
            pending[slot].result()
        chunk = memory[slot][: load.nbytes].view(np.dtype(load.leaf.dtype)).reshape(load.shape)
        pending[slot] = ts.array(chunk).write(stores[load.leaf.key][tuple(slice(*r) for r in load.box)])
    for future in pending:
        if future:
            future.result()


def write(path: str, nbytes: int) -> None:
    """The writing floor, in this process."""
    import numpy as np

    from mtx2vllm.converter.storage import store_for

    block = memoryview(np.random.default_rng(0).bytes(WRITE))
    writer = store_for(path).writer(path, nbytes)
    for at in range(0, nbytes, WRITE):
        writer.write(at, block[: min(WRITE, nbytes - at)])
    writer.commit()


def files(directory: Path) -> Iterator[Path]:
    """Everything below a directory."""
    yield from (path for path in directory.rglob("*") if path.is_file())


def settle(directory: Path, cold: bool) -> None:
    """Put the checkpoint into the page cache, or out of it."""
    for path in files(directory):
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(WRITE):
                    pass


def contenders(args: argparse.Namespace, out: Path, nbytes: int) -> dict[str, Callable[[], Measured]]:
    """What is measured, by name."""
    me = [sys.executable, __file__]
    found = {
        "floor: decode": lambda: measure([*me, str(args.checkpoint), "--role", "decode"]),
        "floor: write": lambda: measure([*me, str(out / "floor"), "--role", "write", "--bytes", str(nbytes)]),
    }
    tool = str(Path(sys.executable).with_name("mtx2vllm"))
    for budget, layout in product(args.budgets.split(","), ("canonical", "hf")):
        command = [tool, "convert", str(args.checkpoint), str(out / "ours"), "--layout", layout]
        found[f"mtx2vllm {layout}, {budget}"] = lambda c=[*command, "--memory-budget", budget]: measure(c)  # type: ignore[misc]
    if args.maxtext:
        found["MaxText to_huggingface"] = lambda: measure(
            maxtext(args.maxtext, args.checkpoint, out / "theirs", args.model),
            JAX_PLATFORMS="cpu",
            HF_HUB_OFFLINE="1",
            DECOUPLE_GCLOUD="TRUE",
        )
    return found


def maxtext(python: str, checkpoint: Path, out: Path, model: str) -> list[str]:
    """MaxText's own exporter on the same checkpoint."""
    where = "import maxtext, pathlib; print(pathlib.Path(maxtext.__file__).parent / 'configs' / 'base.yml')"
    base = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.split()[-1]
    options = {
        "model_name": model,
        "load_parameters_path": checkpoint.absolute() / "0" / "items",
        "base_output_directory": out,
        "scan_layers": "true",
        "weight_dtype": "bfloat16",
        "hardware": "cpu",
        "skip_jax_distributed_system": "true",
    }
    script = [python, "-c", EXPORT, base]
    return [*script, *(f"{k}={v}" for k, v in options.items()), f"--hf_model_path={TOKENIZER}"]


def report(args: argparse.Namespace, nbytes: int, found: dict[str, list[Measured]]) -> dict[str, Any]:
    """The table, printed, and the same as an object."""
    rows = {
        name: Measured(median(m.wall for m in ms), median(m.cpu for m in ms), max(m.rss for m in ms))
        for name, ms in found.items()
    }
    floor = max(row.wall for name, row in rows.items() if name.startswith("floor"))
    theirs = rows.get("MaxText to_huggingface")
    cores = len(os.sched_getaffinity(0))
    cache = "cold" if args.cold else "warm"
    print(
        f"{nbytes / 1e9:.2f} GB, {cores} cores, page cache {cache}, medians of {args.runs} runs, load {os.getloadavg()}"
    )
    print(f"| {'':32} | wall s | CPU s | cores used | peak RSS GB | x floor |{' x faster |' if theirs else ''}")
    print("|" + "---|" * (7 if theirs else 6))
    for name, row in rows.items():
        line = f"| {name:32} | {row.wall:6.2f} | {row.cpu:5.1f} | {row.cpu / row.wall / cores:10.0%} | {row.rss / 1e9:11.2f}"
        line += f" | {row.wall / floor:7.2f} |"
        print(line + (f" {theirs.wall / row.wall:8.1f} |" if theirs else ""))
    return {
        "bytes": nbytes,
        "cores": cores,
        "cache": cache,
        "floor": floor,
        "rows": {name: vars(row) for name, row in rows.items()},
        "runs": {name: [vars(m) for m in ms] for name, ms in found.items()},
    }


def main() -> None:
    """The command line; `--role` is how it calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--budgets", default="1GiB,256MiB")
    parser.add_argument("--maxtext", metavar="PYTHON")
    parser.add_argument("--model", default="qwen3-1.7b", help="MaxText's name of the model")
    parser.add_argument("--scratch", type=Path, help="where results go; default: beside the checkpoint")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--role", choices=["decode", "write"], help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "decode":
        return decode(str(args.checkpoint))
    if args.role == "write":
        return write(str(args.checkpoint), args.bytes)
    from mtx2vllm.converter.source import open_checkpoint

    nbytes = sum(leaf.nbytes for leaf in open_checkpoint(str(args.checkpoint)).leaves.values())
    found: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory(dir=args.scratch or args.checkpoint.absolute().parent) as out:
        for _ in range(args.runs):
            for name, run in contenders(args, Path(out), nbytes).items():
                settle(args.checkpoint, args.cold)
                found.setdefault(name, []).append(run())
                for left in Path(out).iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    result = report(args, nbytes, found)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(f"this process used {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB itself")
    return None


if __name__ == "__main__":
    main()
