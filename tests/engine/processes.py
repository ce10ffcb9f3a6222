"""Engine processes of the tests: each scenario runs once, however many tests look at what it reports."""

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


@cache
def report(family: str, tp: int, expert_parallel: bool, checks: str, settings: str = "{}") -> dict[str, Any]:
    """What one engine process says about `checks` (comma-separated), by check.

    Raises:
        AssertionError: the process failed; its last lines are the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "report.json", Path(folder) / "log"
        arguments = [family, "--tp", str(tp), "--checks", checks, "--settings", settings, str(out)]
        status = _fork([*arguments, *(["--expert-parallel"] if expert_parallel else [])], log)
        if status or not out.exists():
            said = log.read_text(errors="replace")[-5000:] if log.exists() else ""
            raise AssertionError(f"{family} TP={tp}: the engine process failed ({status})\n{said}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _fork(arguments: list[str], log: Path) -> int:
    """Run one scenario in a process of its own (see `forks`); its exit status."""
    parent = _parent()
    if parent.stdin is None or parent.stdout is None:
        raise AssertionError("the process that forks engines has no pipes")
    parent.stdin.write(json.dumps({"arguments": arguments, "log": str(log)}) + "\n")
    parent.stdin.flush()
    answer = parent.stdout.readline()
    if not answer:
        _parent.cache_clear()
        raise AssertionError(f"the process that forks engines ended ({parent.wait()})")
    return int(answer)


@cache
def _parent() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.forks"],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
