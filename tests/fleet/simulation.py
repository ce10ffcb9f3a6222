"""Many replicas on one root: real agents, real storage and staging, an engine that keeps arrays in a dictionary."""

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from versions import BF16, write_manifest, write_version

from fleet.live import until
from mtx2vllm.converter.fleet.versions import list_versions, prune
from mtx2vllm.converter.storage import join, store_for
from mtx2vllm.reload import ReloadAgent
from mtx2vllm.reload.engine import Change, SwapTimings, TensorSpec
from mtx2vllm.reload.stage import Options, Stager

WRITES = {"create", "replace", "delete", "writer", "delete_all"}
VERBS = WRITES | {"stat", "listdir", "walk", "read", "read_into"}
TEMPTING = 1_000_000  # directories with numbers from here on are never committed


def tensors(step: int) -> dict[str, np.ndarray]:
    """Every element says the step, so that a mixture of two versions shows."""
    names = {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,)}
    names |= {f"model.layers.{i}.mlp.down_proj.weight": (8, 8) for i in range(4)}
    high, low = divmod(step, 128)  # bf16 holds each exactly
    return {
        n: np.array([high, low] * (int(np.prod(s)) // 2), np.float32).reshape(s).astype(BF16) for n, s in names.items()
    }


class Sampler:
    """An engine that looks at what it holds after every swap."""

    replica_suffix = ""
    dummy = False

    def __init__(self) -> None:
        self.state = {name: np.zeros_like(value) for name, value in tensors(0).items()}
        self.loaded: list[int] = []
        self.mixtures: list[int] = []

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(value.shape, value.dtype) for name, value in self.state.items()}

    def untouched(self) -> dict[str, TensorSpec]:
        return {}

    def mode_for(self, nbytes: int) -> str:
        return "double"

    def swap(self, change: Change) -> SwapTimings:
        self.state |= {name: np.array(value) for name, value in change.weights.items()}
        whole = tensors(change.version)
        if any(self.state[name].tobytes() != value.tobytes() for name, value in whole.items()):
            self.mixtures.append(change.version)
        self.loaded.append(change.version)
        return SwapTimings(0.0, 0.0, "double")

    def set_ready(self, ready: bool) -> None:
        pass

    def refuse(self, why: str | None) -> None:
        pass

    def alive(self) -> bool:
        return True


class SharedStagers:
    """A few staging processes for all replicas of one machine, where each sampler of a real fleet has its own."""

    def __init__(self, count: int) -> None:
        self._all = [Stager(Options()) for _ in range(count)]
        self._free: queue.SimpleQueue[Stager] = queue.SimpleQueue()
        for stager in self._all:
            self._free.put(stager)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stage(self, *args: Any, **options: Any) -> Any:
        stager = self._free.get()
        try:
            return stager.stage(*args, **options)
        finally:
            self._free.put(stager)

    def end(self) -> None:
        for stager in self._all:
            stager.close()


@dataclass
class Counts:
    """Requests to a store, by verb, of all threads but the one that counts."""

    verbs: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _except: threading.Thread = field(default_factory=threading.current_thread)

    def add(self, verb: str) -> None:
        if threading.current_thread() is not self._except:
            with self._lock:
                self.verbs[verb] += 1

    def rates(self, before: Mapping[str, int], replicas: int, seconds: float) -> tuple[float, float]:
        """(reads, writes) for each replica and minute since `before`."""
        new = {verb: count - before.get(verb, 0) for verb, count in self.verbs.items()}
        writes = sum(count for verb, count in new.items() if verb in WRITES)
        scale = 60 / seconds / replicas
        return (sum(new.values()) - writes) * scale, writes * scale


@contextmanager
def counted(store: type) -> Iterator[Counts]:
    """Count the verbs of a kind of store. Those that call others of their own count once."""
    counts, originals, inside = Counts(), {}, threading.local()

    def wrap(verb: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if getattr(inside, "call", False):
                return real(*args, **options)
            inside.call = True
            counts.add(verb)
            try:
                return real(*args, **options)
            finally:
                inside.call = False

        return call

    for verb in VERBS:
        originals[verb] = getattr(store, verb)
        setattr(store, verb, wrap(verb, originals[verb]))
    try:
        yield counts
    finally:
        for verb, real in originals.items():
            setattr(store, verb, real)


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Result:
    """What a simulation saw. Rates are (reads, writes) for each replica and minute; sizes in bytes."""

    replicas: int
    versions: int
    seconds: float
    loads: list[list[int]]
    mixtures: int
    failures: int
    busy: tuple[float, float]
    idle: tuple[float, float]
    rss: tuple[int, int]
    on_newest: int
    pruned: int

    def table(self) -> str:
        """For the note."""
        per = [len(loads) for loads in self.loads]
        rows = [
            ("replicas", f"{self.replicas}"),
            ("versions published", f"{self.versions} in {self.seconds:.0f} s"),
            ("replicas on the newest at the end", f"{self.on_newest}"),
            ("loads of a replica: least, most", f"{min(per)}, {max(per)}"),
            ("mixtures or incomplete versions loaded", f"{self.mixtures}"),
            ("versions pruned meanwhile", f"{self.pruned}"),
            ("loads that failed (version pruned while staged)", f"{self.failures}"),
            ("reads, writes of a replica and minute, while versions come", f"{self.busy[0]:.0f}, {self.busy[1]:.1f}"),
            ("reads, writes of a replica and minute, idle", f"{self.idle[0]:.0f}, {self.idle[1]:.1f}"),
            ("memory of all at 1/4, at the end", f"{self.rss[0] / 2**20:.0f} MiB, {self.rss[1] / 2**20:.0f} MiB"),
        ]
        return "\n".join(f"{name:<60}{value:>18}" for name, value in rows)


def simulate(
    home: Path, *, replicas: int, versions: int, pace: float, idle: float, followed: float,
    bucket: str | None = None, poll: float | None = None, keep: int = 4,
) -> Result:  # fmt: skip
    """Publish versions, one every `pace` seconds at most, each in pieces with its manifest last; prune behind them.

    The next one waits until a share `followed` of the replicas has the one before. The root is a local directory, or
    lies in `bucket`.
    """
    root = Root(home / "root", None if bucket is None else f"{bucket}/root")
    stagers, engines = SharedStagers(2), [Sampler() for _ in range(replicas)]
    with counted(type(store_for(root.location))) as counts:
        agents = [
            ReloadAgent(engine, root.location, replica=f"r{i:02d}", poll_seconds=poll)
            for i, engine in enumerate(engines)
        ]
        for agent in agents:
            agent._replica.stager.close()
            agent._replica.stager = stagers  # type: ignore[assignment]
            agent.start()
        begun, before, early, pruned = time.monotonic(), dict(counts.verbs), 0, 0
        try:
            for step in range(1, versions + 1):
                root.publish(step, max(begun + step * pace - time.monotonic(), 0.0))
                wanted = round(replicas * followed)
                until(lambda: sum(e.loaded[-1:] == [step] for e in engines) >= wanted, 120, f"version {step}")  # noqa: B023
                if step % 10 == 0:
                    pruned += len(prune(root.location, keep).removed)
                if step == max(versions // 4, 1):
                    early = resident()
            until(lambda: all(e.loaded[-1:] == [versions] for e in engines), 120, "all replicas on the newest")
            seconds = time.monotonic() - begun
            busy = counts.rates(before, replicas, seconds)
            until(lambda: root.told(versions) == replicas, 60, "all leases to say so")
            before = dict(counts.verbs)
            time.sleep(idle)
            resting = counts.rates(before, replicas, idle)
            return Result(
                replicas, versions, seconds, [e.loaded for e in engines], sum(len(e.mixtures) for e in engines),
                sum(a.status().failures for a in agents), busy, resting, (early, resident()), root.told(versions), pruned,
            )  # fmt: skip
        finally:
            for agent in agents:
                agent._stopping.set()
            for agent in agents:
                agent.stop()
            stagers.end()


class Root:
    """Where versions are published; those of a bucket are made in `local` first."""

    def __init__(self, local: Path, remote: str | None) -> None:
        local.mkdir()
        self.local, self.remote = local, remote
        self.location = remote or str(local)

    def publish(self, step: int, seconds: float) -> None:
        """In pieces, spread over the time until it is due; beside it a newer number that stays incomplete."""
        for number in (TEMPTING + step, step):
            self._upload(write_version(self.local / str(number), tensors(number), commit=False))
        if step > 1:
            store_for(self.location).delete_all(join(self.location, str(TEMPTING + step - 1)))
        time.sleep(seconds)
        write_manifest(self.local / str(step))
        self._upload(self.local / str(step), "mtx2vllm.json")

    def _upload(self, version: Path, pattern: str = "**/*") -> None:
        for path in sorted(version.glob(pattern)) if self.remote else ():
            if path.is_file():
                name = path.relative_to(self.local).as_posix()
                store_for(self.location).replace(join(self.location, name), path.read_bytes())

    def told(self, step: int) -> int:
        """How many live replicas say that they serve a step."""
        return sum(replica.loaded == step and replica.alive for replica in list_versions(self.location).replicas)
