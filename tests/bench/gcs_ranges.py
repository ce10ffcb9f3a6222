"""What parallel ranges gain over serial ones where every request takes a while.

    python tests/bench/gcs_ranges.py [--latency 0.02] [--size 128] [--runs 3]

The real fake-gcs-server runs behind a proxy in a process of its own that holds every answer back. The same object is
read by the product's store, range by range: one request at a time, then as many as the product keeps under way
(`fetch_shard.THREADS`); then a whole version by `fetch_version`, which hashes and writes as well. Medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorstore as ts

sys.path.insert(0, str(Path(__file__).parent.parent))

import versions
from gcs import emulator

from mtx2vllm.converter.storage import basename, join, parent
from mtx2vllm.converter.storage.gs import GsStore
from mtx2vllm.converter.storage.gs_http import EMULATOR
from mtx2vllm.converter.version import fetch, fetch_shard

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=0.02, help="seconds a request")
    parser.add_argument("--size", type=int, default=128, help="MiB of the object")
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args()
    with emulator.emulator() as url:
        bucket = emulator.make_bucket(url)
        direct = GsStore(url)
        size = upload(direct, bucket, chosen.size)
        relay = start_proxy(url, chosen.latency)
        try:
            through = relay.stdout.readline().strip()
            slow = GsStore(through)
            path = join(bucket, "100/canonical/model-00001-of-00001.safetensors")
            print(
                f"{size / MIB:.0f} MiB, {chosen.latency * 1000:.0f} ms a request, {fetch_shard.THREADS} requests at a time"
            )
            print("range      serial       parallel     gain   (no latency: serial, parallel) (TensorStore, parallel)")
            for span in (MIB // 4, MIB, fetch_shard.RANGE):
                rates = [
                    rate(chosen.runs, size, lambda s=store, t=threads, n=span: read(s, path, size, n, t))
                    for store in (slow, direct)
                    for threads in (1, fetch_shard.THREADS)
                ]
                print(
                    f"{span / MIB:4.2f} MiB {rates[0]:7.1f} MB/s {rates[1]:8.1f} MB/s {rates[1] / rates[0]:6.1f}x"
                    f"   ({rates[2]:.0f}, {rates[3]:.0f} MB/s)"
                    f" ({rate(chosen.runs, size, lambda n=span: tensorstore(slow, path, size, n)):.1f} MB/s)"
                )
            os.environ[EMULATOR] = through
            print(f"fetch_version: {rate(chosen.runs, size, lambda: copy(join(bucket, '100'))):.1f} MB/s")
        finally:
            relay.stdin.close()
            relay.wait()


def upload(store: GsStore, bucket: str, mib: int) -> int:
    """A version of one shard; the shard's size in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        rng = np.random.default_rng(0)
        tensors = {f"t{n}": rng.integers(0, 1 << 16, MIB * 4, np.uint16).view(versions.BF16) for n in range(mib // 8)}
        made = versions.write_version(Path(directory) / "100", tensors, shards=1)
        for file in sorted(made.rglob("*")):
            if file.is_file():
                data = file.read_bytes()
                writer = store.writer(join(bucket, "100", file.relative_to(made).as_posix()), len(data))
                writer.write(0, memoryview(data))
                writer.commit()
        return next(made.rglob("*.safetensors")).stat().st_size


def start_proxy(url: str, latency: float) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "gcs.proxy", url, str(latency)]
    home = Path(__file__).parent.parent
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=home)


def read(store: GsStore, path: str, size: int, span: int, threads: int) -> None:
    out = memoryview(bytearray(size))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: store.read_into(path, at, out[at : at + span]), range(0, size, span)))


def tensorstore(store: GsStore, path: str, size: int, span: int) -> None:
    """The same ranges by TensorStore, copied into one buffer."""
    out = memoryview(bytearray(size))
    context = ts.Context({"gcs_request_concurrency": {"limit": fetch_shard.THREADS}})
    kvstore = ts.KvStore.open(store.kvstore(parent(path)), context=context).result()
    reads = {
        at: kvstore.read(basename(path), byte_range=slice(at, min(at + span, size))) for at in range(0, size, span)
    }
    for at, future in reads.items():
        value = future.result().value
        out[at : at + len(value)] = value


def copy(version: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fetch.fetch_version(version, directory)


def rate(runs: int, size: int, call: Callable[[], None]) -> float:
    """Median MB/s."""
    taken = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return size / statistics.median(taken) / 1e6


if __name__ == "__main__":
    main()
