"""The parts of a live fleet, as processes and threads that can be killed: a trainer that writes slowly, a follower, and a
watcher that looks at every version the moment it is there.

An engine under `vllm serve` is one more part: a process with `start`, `kill` and `stop` like `FollowerProcess`.
"""

import hashlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from data_files import DATA, arrays, digests, folded

from fleet.run_source import CONFIG
from mtx2vllm.converter.version.verify import verify_version

MAIN = "from mtx2vllm.converter.cli import main; main()"
CONTENTS = {  # a real step -> what others make of it, in bf16
    "trained": DATA / "trained/qwen3-scanned/checkpoints/3",
    "original": DATA / "qwen3/scanned/0",
}
Digests = dict[str, str]


def expected(content: str) -> Digests:
    """sha256 of every tensor in the hf layout: MaxText's own export rounded to bf16, or the original model."""
    if content == "original":
        return {folded(n): d["sha256"] for n, d in digests(DATA / "qwen3/hf").items()}
    export = arrays(DATA / "trained/qwen3-scanned/maxtext_hf_step3")
    rounded = {n: np.asarray(a).astype(ml_dtypes.bfloat16).tobytes() for n, a in export.items()}
    return {folded(n): hashlib.sha256(b).hexdigest() for n, b in rounded.items()}


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something that another process does; the limit only says when to give up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.01)


def content_of(step: int) -> str:
    """What a step holds: every other one the same."""
    return ("trained", "original")[step // 10 % 2]


class Trainer(threading.Thread):
    """Writes steps 10, 20, ... one after another, file by file, as Orbax does on a disk, until `finish`."""

    def __init__(self, run: Path, pause: float) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.pause = run, pause
        self.written: list[int] = []
        self._enough = threading.Event()

    def finish(self) -> list[int]:
        """Write the step under way, and say which there are."""
        self._enough.set()
        self.join()
        return self.written

    def run(self) -> None:
        while not self._enough.is_set():
            self.write(10 * (len(self.written) + 1))

    def write(self, step: int) -> None:
        """One step."""
        content = content_of(step)
        temporary = self.run_dir / "checkpoints" / f"{step}.orbax-checkpoint-tmp-1"
        files = sorted(p for p in CONTENTS[content].rglob("*") if p.is_file())
        for file in files:
            target = temporary / file.relative_to(CONTENTS[content])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            time.sleep(self.pause / len(files))
        temporary.rename(temporary.with_name(str(step)))
        self.written.append(step)


class FollowerProcess:
    """`mtx2vllm follow`, as a container runs it."""

    def __init__(self, run: Path, root: Path, log: Path, *options: str) -> None:
        self.words = [
            sys.executable,
            "-c",
            MAIN,
            "follow",
            str(run),
            str(root),
            "--hf-config",
            CONFIG,
            "--poll",
            "0.05",
        ]
        self.words += ["--log-format", "json", *options]
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(self.words, stderr=stream, stdout=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Of the last one started."""
        assert self.process is not None
        return self.process.pid

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class RootWatcher(threading.Thread):
    """Checks each version whole as soon as it is committed, with the oracle of what its step holds."""

    def __init__(self, root: Path, content: Callable[[int], str] = content_of) -> None:
        super().__init__(daemon=True)
        self.root, self.content = root, content
        self.oracle = {name: expected(name) for name in CONTENTS}
        self.seen: dict[int, bytes] = {}
        self.problems: list[str] = []
        self.looks = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self.look()

    def finish(self) -> None:
        """Stop, and look at everything once more."""
        self._ended.set()
        self.join()
        before, self.seen = self.seen, {}
        self.look()
        self.problems += [f"{step} was changed or removed" for step in before if self.seen.get(step) != before[step]]

    def look(self) -> None:
        self.looks += 1
        for path in self.root.glob("[0-9]*/mtx2vllm.json"):
            step = int(path.parent.name)
            if step not in self.seen:
                self.seen[step] = path.read_bytes()
                self.problems += [f"{step}: {text}" for text in self._check(path.parent, self.content(step))]

    def _check(self, version: Path, content: str) -> list[str]:
        try:
            found: Any = verify_version(str(version))
            if not found.ok:
                return list(found.problems)
            ours = {folded(n): d["sha256"] for n, d in digests(version).items()}
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        wanted = self.oracle[content]
        return [
            f"tensor {n} is not that of {content}" for n in wanted.keys() | ours.keys() if wanted.get(n) != ours.get(n)
        ]
