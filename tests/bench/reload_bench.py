"""What a hot reload costs a running engine: `python tests/bench/reload_bench.py [--swaps 4] [--modes double,inplace]`

The real engine (vllm-tpu and tpu-inference on a CPU, see tests/engine) serves a stream of requests with a synthetic
Qwen3 of 1.2 GB, while `load_version` brings in one version after another, converted from synthetic checkpoints. Printed
for each swap, from one run:

    stage, prepare, pause, total    seconds; staging includes the verification
    write                           the part of the pause that puts weights in, and its GB/s
    gap                             the longest time between two steps' tokens while staging, while preparing, and around
                                    the pause until a second after it; beside it the longest in the 8 s before
    rate                            tokens a second while staging and while preparing; beside it the rate before
    compiled                        programs compiled inside the pause, and on the engine's thread until a second after

    raw                             the raw copy just before it, with the engine idle: the same files mapped, each tensor
                                    given to `device_put`; and the pause in terms of it

On a CPU the device's memory is the host's: what was prepared there is not copied once more in the pause, only tensors
that are taken as they are (embedding, head, norms). Staging and preparing share the cores with the engine's own steps:
--device-threads 1 gives XLA one thread, so that on two cores the other one is free, as a host beside a TPU is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

COMPILED = "/jax/core/compile/backend_compile_duration"
SETTLE_S = 1.0
BEFORE_S = 8.0


@dataclass
class Stream:
    """Requests that never end, stepped by this thread; when tokens came, and how many."""

    llm: Any
    stamps: list[tuple[float, int]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    number: int = 0

    def run(self) -> None:
        from vllm import SamplingParams, TokensPrompt

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
        lengths: dict[str, int] = {}
        while not self.stopping.is_set():
            while len(lengths) < 4:
                self.number += 1
                engine.add_request(
                    f"r{self.number}", TokensPrompt(prompt_token_ids=[self.number % 500 + 1] * 16), sampling
                )
                lengths[f"r{self.number}"] = 0
            count = 0
            for out in engine.step():
                count += len(out.outputs[0].token_ids) - lengths[out.request_id]
                lengths[out.request_id] = len(out.outputs[0].token_ids)
                if out.finished:
                    del lengths[out.request_id]
            if count:
                self.stamps.append((time.monotonic(), count))
        engine.abort_request(list(lengths))

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second over the whole steps that overlap a span."""
        stamps = list(self.stamps)
        first = max((i for i, (at, _) in enumerate(stamps) if at <= begin), default=0)
        last = next((i for i, (at, _) in enumerate(stamps) if at >= end), len(stamps) - 1)
        return sum(n for _, n in stamps[first + 1 : last + 1]) / max(stamps[last][0] - stamps[first][0], 1e-9)

    def gap(self, begin: float, end: float) -> float:
        """The longest time without a token that overlaps a span."""
        times = [at for at, _ in self.stamps]
        return max((b - a for a, b in pairwise(times) if b >= begin and a <= end), default=0.0)


@contextmanager
def running(llm: Any) -> Iterator[Stream]:
    stream = Stream(llm)
    thread = threading.Thread(target=stream.run, name="stream")
    thread.start()
    try:
        yield stream
    finally:
        stream.stopping.set()
        thread.join()


def make_versions(root: Path, count: int, layers: int) -> Path:
    """ROOT/1..count, converted from checkpoints of different seeds; the config's directory."""
    from make_checkpoint import Sizes, make

    sizes = Sizes(
        hidden=1024, layers=layers, ffn=4096, heads=16, kv_heads=8, head_dim=128, vocab=65536, experts=0, tied=False
    )
    for seed in range(1, count + 1):
        checkpoint = root.parent / f"checkpoint-{seed}"
        make(checkpoint, sizes, {"first": 16}, seed=seed)
        command = [sys.executable, "-c", "from mtx2vllm.converter.cli import main; main()", "convert"]
        subprocess.run([*command, str(checkpoint), str(root / str(seed))], check=True, capture_output=True)
    return root.parent / "checkpoint-1"


def raw_put(version: Path) -> tuple[float, int]:
    """Seconds and bytes of mapping a version's shards and copying each tensor to the device."""
    import jax
    import numpy as np

    manifest = json.loads((version / "mtx2vllm.json").read_text())
    begun, total, held = time.monotonic(), 0, []
    maps = {name: np.memmap(version / name, np.uint8, "r") for name, e in manifest["files"].items() if e["shard"]}
    for entry in manifest["tensors"].values():
        nbytes = 2 * int(np.prod(entry["shape"]))
        # tests/engine/cpu_backend makes this a copy, as it is on a TPU.
        held.append(jax.device_put(maps[entry["file"]][entry["offset"] : entry["offset"] + nbytes]))
        jax.block_until_ready(held[-1])
        total += nbytes
    return time.monotonic() - begun, total


def watch_swaps(engine: Any) -> list[tuple[float, float, float]]:
    """When each swap was handed to the engine, and when its pause began and ended."""
    spans: list[tuple[float, float, float]] = []
    handed: list[float] = []
    between, swap_ = engine._between, engine.swap

    def swap(change: Any) -> Any:
        handed.append(time.monotonic())
        return swap_(change)

    def timed(*args: Any) -> Any:
        begun = time.monotonic()
        try:
            return between(*args)
        finally:
            spans.append((handed[-1], begun, time.monotonic()))

    engine.swap, engine._between = swap, timed
    return spans


def watch_compilations() -> list[tuple[float, str]]:
    """When a program was compiled, and the thread that waited for it."""
    import jax.monitoring

    seen: list[tuple[float, str]] = []

    def note(name: str, _: float, **__: Any) -> None:
        if name == COMPILED:
            seen.append((time.monotonic(), threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(note)
    return seen


def swap(
    llm: Any, stream: Stream, version: Path, mode: str, compiled: list[tuple[float, str]], spans: Any, raw: float
) -> dict[str, Any]:
    """Load one version while the stream runs; what it cost."""
    from mtx2vllm.reload import load_version

    begun = time.monotonic()
    report = load_version(llm, str(version), swap=mode)
    ended = time.monotonic()
    time.sleep(SETTLE_S + 2 * median(b - a for (a, _), (b, _) in pairwise(stream.stamps)))
    handed, low, high = spans[-1]
    seconds = dict(report.seconds)
    return {
        "raw": raw, "version": report.version, "mode": report.mode, "bytes": report.nbytes, "total": ended - begun,
        "stage": seconds["verify"] + seconds["stage"], "prepare": seconds["prepare"], "pause": seconds["pause"],
        "write": report.details["write"], "drain": report.details["drain"],
        "gaps": [stream.gap(begun, handed), stream.gap(handed, low), stream.gap(low, high + SETTLE_S)],
        "gap_before": stream.gap(begun - BEFORE_S, begun), "rate_before": stream.rate(begun - BEFORE_S, begun),
        "rates": [stream.rate(begun, handed), stream.rate(handed, low)],
        "compiled_in_pause": sum(low <= at <= high for at, _ in compiled),
        "compiled_after": sum(low <= at <= ended + SETTLE_S and thread == "stream" for at, thread in compiled),
    }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    gb = row["bytes"] / 1e9
    return (
        f"{row['mode']:8} {gb:.2f} GB  stage {row['stage']:.2f}  prepare {row['prepare']:.2f}  pause {row['pause']:.3f}  "
        f"total {row['total']:.2f} s  write {row['write']:.3f} s = {gb / max(row['write'], 1e-9):.1f} GB/s  "
        f"gaps {', '.join(f'{gap:.2f}' for gap in row['gaps'])} s ({row['gap_before']:.2f})  "
        f"rates {', '.join(f'{rate:.1f}' for rate in row['rates'])} ({row['rate_before']:.1f}) tokens/s  "
        f"compiled {row['compiled_in_pause']} + {row['compiled_after']}  "
        f"raw {row['raw']:.2f} s = {gb / row['raw']:.1f} GB/s, pause {row['pause'] / row['raw']:.2f} of it"
    )


def summary(mode: str, rows: list[dict[str, Any]]) -> str:
    """Medians over all swaps but the first, which compiles."""
    if not rows:
        return f"{mode}: the first swap alone says nothing"
    staged, prepared = (median(row["rates"][i] / row["rate_before"] for row in rows) for i in (0, 1))
    return (
        f"{mode}: medians of {len(rows)}: pause {median(row['pause'] for row in rows):.3f} s = "
        f"{median(row['pause'] / row['raw'] for row in rows):.2f} of the raw copy; token rate while staging "
        f"{staged:.0%} and while preparing {prepared:.0%} of the one before; longest gap "
        f"{max(max(row['gaps']) for row in rows):.2f} s ({max(row['gap_before'] for row in rows):.2f} s before)"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=3, help="in each mode")
    parser.add_argument("--modes", default="double,inplace")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device-threads", type=int, help="of XLA; default: one a core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device_threads:
        os.environ["NPROC"] = str(options.device_threads)  # read by XLA's client for CPUs (tsl's DefaultThreadPoolSize)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        config = make_versions(root, 2, options.layers)
        from engine.start import start

        llm = start(config, load_format="dummy", max_num_seqs=4)
        from mtx2vllm.reload.engines.tpu_inference import of_llm_engine

        spans, compiled, rows = watch_swaps(of_llm_engine(llm.llm_engine)), watch_compilations(), []
        raw_put(root / "1")
        for number, mode in enumerate(m for m in options.modes.split(",") for _ in range(options.swaps)):
            raw, _ = raw_put(root / str(number % 2 + 1))
            with running(llm) as stream:
                while len(stream.stamps) < 40:
                    time.sleep(0.2)
                time.sleep(BEFORE_S)
                rows.append(swap(llm, stream, root / str(number % 2 + 1), mode, compiled, spans, raw))
            print(shown(rows[-1]), flush=True)
        for mode in options.modes.split(","):
            print(summary(mode, [row for row in rows if row["mode"] == mode][1:]))
        if options.json:
            options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
