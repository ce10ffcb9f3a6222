"""Engine processes of the tests: each scenario runs once, however many tests look at what it reports."""

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
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "engine.scenario", family, "--tp", str(tp), "--checks", checks]
        command += ["--settings", settings, *(["--expert-parallel"] if expert_parallel else []), str(out)]
        run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1500, check=False)
        if not out.exists():
            raise AssertionError(
                f"{family} TP={tp}: the engine process failed ({run.returncode})\n{run.stderr[-5000:]}"
            )
        found: dict[str, Any] = json.loads(out.read_text())
        return found
