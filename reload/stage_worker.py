"""The process that reads and hashes a version, so that the engine's own process does neither: `python -m` this module.

Jobs come as JSON over a socket on stdin; each is answered by JSON lines on stdout, the last of which is `done` or
`failed`. Nothing else crosses: no pickles. The process is kept, for starting Python costs more than hashing a gigabyte.

Bytes that the sampler can map stay where they are (reading them here brings them into the page cache);
others are assembled in shared memory (a file descriptor that came with the job) or in the cache. The process has a low
priority and ends with its parent.
"""

import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError, NotCommitted, StorageError
from mtx2vllm.converter.storage import Store, join, store_for
from mtx2vllm.converter.version.pieces import head_of, recipes
from mtx2vllm.converter.version.verify import load_manifest, shard_problems
from mtx2vllm.reload.job import Job
from mtx2vllm.reload.stage_work import Unsound, Work

_NICE = 19  # a seventieth of a busy core beside the engine's threads; an idle core is used whole


def main() -> int:
    """Run jobs until the parent closes the socket, which is this process's standard input."""
    lock = threading.Lock()

    def say(**message: Any) -> None:
        with lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    _be_modest(os.getppid())
    jobs = socket.socket(fileno=0)
    while (received := _receive(jobs)) is not None:
        line, memory = received
        try:
            say(done=run(Job.model_validate_json(line), memory, say))
        except BrokenPipeError:
            return 1
        except Exception as error:  # the parent turns it into a sentence and a reason
            say(failed=reason_of(error), problems=problems_of(error))
        finally:
            if memory is not None:
                os.close(memory)
            gc.collect()  # shared memory lives as long as a view of it
    return 0


def _receive(jobs: socket.socket) -> tuple[bytes, int | None] | None:
    """One job: 8 bytes of length, with which a file descriptor may come, then JSON. None at the end."""
    head, descriptors, _, _ = socket.recv_fds(jobs, 8, 1)
    if len(head) < 8:
        return None
    with jobs.makefile("rb") as stream:
        return stream.read(int.from_bytes(head, "little")), descriptors[0] if descriptors else None


def reason_of(error: BaseException) -> str:
    """A failure's word in the metrics: `invalid` is the version's fault for good, the others may pass."""
    if isinstance(error, FileNotFoundError | NotCommitted | EOFError):
        return "vanished"
    if isinstance(error, LostRace):
        return "changed"
    if isinstance(error, StorageError | OSError):
        return "storage"
    return "invalid" if isinstance(error, InputError | Unsound) else "internal"


def problems_of(error: BaseException) -> list[str]:
    """Whole sentences about a failure."""
    if isinstance(error, InputError):
        return list(error.problems)
    if isinstance(error, Unsound | Mtx2vllmError):
        return [str(error)]
    if isinstance(error, FileNotFoundError):
        return [f"{error.filename or error} is not there: it was deleted while it was read, or is not copied yet."]
    return [f"{type(error).__name__}: {error}"]


def _be_modest(parent: int) -> None:
    """Stay out of the engine's way, and do not outlive it."""
    os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(job: Job, memory: int | None, say: Callable[..., None]) -> dict[str, Any]:
    """Stage everything; the facts that the parent needs to open it."""
    store = store_for(job.location)
    manifest, found = load_manifest(job.location, store)
    if found != job.digest:
        raise LostRace(f"{job.location} was published anew while it was being staged.")
    sources = recipes(manifest.tensors, manifest.layout, manifest.family, head_of(manifest.conventions))
    files = {manifest.tensors[p.source].file for item in job.items for p in sources[item.folded].pieces}
    identities = {name: _identity(store, join(job.location, name)) for name in sorted(files)}
    # From behind a network a header is read once more before it counts as damaged, as tensors are (stage_work).
    for _ in range(1 if store.local(job.location) is not None else 2):
        problems = [
            problem for name in sorted(files) for problem in shard_problems(store, job.location, name, manifest)
        ]
        if not problems:
            break
    else:
        raise InputError(problems)
    say(verified=len(files))
    work = Work(job, memory, (store, manifest, sources), say)
    work.all()
    if identities != {name: _identity(store, join(job.location, name)) for name in identities}:
        raise LostRace(f"{job.location}: a file was replaced while it was being staged.")
    return {"files": identities, "cached": work.cached, "read": work.read}


def _identity(store: Store, path: str) -> list[int]:
    """What tells a local file from another one of the same name, by which the parent knows that it maps what was
    hashed here; the generation where the store is remote."""
    local = store.local(path)
    if local is not None:
        stat = os.stat(local)  # noqa: PTH116
        return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns]
    remote = store.stat(path)
    if remote is None:
        raise FileNotFoundError(path)
    return [remote.generation, remote.size]


if __name__ == "__main__":
    sys.exit(main())
