"""Bringing a version's bytes within reach before anything pauses.

The work is done by a process of its own (`stage_worker`); this side starts it, listens, and maps what it has read:
files of a local disk as they are (only hashed by then, and in the page cache), everything else from shared memory or
the cache. Nothing runs under the engine's GIL but this bookkeeping.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtx2vllm.converter.storage import store_for
from mtx2vllm.converter.version.pieces import DTYPES
from mtx2vllm.reload.job import Item, Job
from mtx2vllm.reload.match import Target
from mtx2vllm.reload.staged import Staged, StageFailed, Version, open_staged
from mtx2vllm.reload.watch import is_silent

_ALIGNMENT = 4096  # of tensors in shared memory: whole pages go to the device fastest
_SILENCE_S = 300.0  # a worker that reads nothing for so long hangs in a mount
_TICK_S = 0.2
# The worker allocates chunks over and over: keep freed memory instead of faulting fresh pages in each time.
_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, slots=True)
class Options:
    """How to stage: where what cannot be mapped goes, and whether to screen values."""

    cache_dir: str | None = None
    cache_size: int = 0
    screen: bool = False


class Stager:
    """The staging process, kept from one version to the next. One job at a time; `close` ends it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: socket.socket | None = None

    def start(self) -> None:
        """Start the process, so that the first version does not wait for it. Does nothing where it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "mtx2vllm.reload.stage_worker"]
        try:
            self._process = subprocess.Popen(  # noqa: S603  (our own module)
                command, stdin=theirs.fileno(), stdout=subprocess.PIPE, env={**os.environ, **_MALLOC}
            )
        except OSError as error:
            ours.close()
            raise StageFailed("internal", [f"the staging process could not be started: {error}."]) from None
        finally:
            theirs.close()
        ours.settimeout(_SILENCE_S)
        self._jobs = ours

    def close(self) -> None:
        """End the process, whatever it is doing."""
        process, self._process = self._process, None
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def stage(
        self,
        version: Version,
        targets: Mapping[str, Target],
        cancelled: Callable[[], bool] = lambda: False,
        keep: Collection[str] = (),
    ) -> Staged:
        """Verify and read `targets` of a version. `keep`: cached keys not to remove for it.

        Raises:
            StageFailed: with the reason and whole sentences.
        """
        if not targets:
            return Staged({}, 0, 0.0, 0.0)
        items, size = _items(version, targets, self._options.cache_dir)
        job = Job(
            location=version.location, digest=version.digest, items=items, memory_size=size, keep=sorted(keep),
            cache_dir=self._options.cache_dir, cache_size=self._options.cache_size, screen=self._options.screen,
        )  # fmt: skip
        begun = time.monotonic()
        memory = _memory(size)
        try:
            done, verified = self._run(job, memory, cancelled)
            weights, files = open_staged(version, targets, items, done, None if memory is None else (memory, size))
        finally:
            if memory is not None:
                os.close(memory)
        total = sum(target.nbytes for target in targets.values())
        cached = frozenset(item.key for item in items if item.where == "cache")
        return Staged(weights, total, verified - begun, time.monotonic() - verified, cached, files)

    def _run(self, job: Job, memory: int | None, cancelled: Callable[[], bool]) -> tuple[dict[str, Any], float]:
        """Send a job and listen; what it reports, and when the headers were checked. A process that was given up, or
        has failed in an unforeseen way, is not used again."""
        self.start()
        try:
            if self._jobs is None or self._process is None:
                raise OSError("no staging process")
            text = job.model_dump_json().encode()
            socket.send_fds(self._jobs, [len(text).to_bytes(8, "little")], [] if memory is None else [memory])
            self._jobs.sendall(text)
            return _listen(self._process, cancelled)
        except OSError as error:
            self.close()
            raise StageFailed("internal", [f"the staging process ended: {error}."]) from None
        except StageFailed as error:
            if error.reason in {"cancelled", "internal", "storage"}:
                self.close()
            raise


def _memory(size: int) -> int | None:
    """Anonymous memory that another process can fill: unlike /dev/shm, no container bounds it to 64 MB."""
    if size == 0:
        return None
    fd = os.memfd_create("mtx2vllm-stage")
    os.ftruncate(fd, size)
    return fd


def mappable(location: str) -> bool:
    """Whether the files of a version can be mapped for good: on a network mount a server's trouble would be a signal
    that kills the engine."""
    local = store_for(location).local(location)
    return local is not None and not is_silent(local)


def _items(version: Version, targets: Mapping[str, Target], cache_dir: str | None) -> tuple[list[Item], int]:
    """What the worker is to do, and how much shared memory that takes."""
    local, items, size = mappable(version.location), [], 0
    for target in targets.values():
        width = DTYPES[target.dtype].itemsize
        entry = version.manifest.tensors[target.recipe.pieces[0].source]
        where: Literal["file", "memory", "cache"]
        offset = 0
        if local and target.as_stored and entry.offset % width == 0:
            where = "file"
        elif cache_dir is not None:
            where = "cache"
        else:
            where, offset = "memory", size
            size += -(-max(target.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        items.append(Item(folded=target.folded, dtype=target.dtype, where=where, key=target.key, offset=offset))
    return items, size


def _listen(process: "subprocess.Popen[bytes]", cancelled: Callable[[], bool]) -> tuple[dict[str, Any], float]:
    verified = heard = time.monotonic()
    fd, buffer = process.stdout.fileno() if process.stdout else -1, b""
    poll = select.poll()  # unlike select(), it takes the large descriptors of a busy server
    poll.register(fd, select.POLLIN)
    while True:
        if cancelled():
            raise StageFailed("cancelled", ["staging was given up."])
        if not poll.poll(_TICK_S * 1000):
            if time.monotonic() - heard > _SILENCE_S:
                raise StageFailed("storage", [f"reading made no progress for {_SILENCE_S:.0f} s; does the mount hang?"])
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            raise StageFailed("internal", [f"the staging process ended early (exit status {process.wait()})."])
        heard = time.monotonic()
        *lines, buffer = (buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "failed" in message:
                raise StageFailed(message["failed"], message["problems"])
            if "done" in message:
                return message["done"], verified
            verified = heard if "verified" in message else verified
