"""A trainer's run directory, filled with the real checkpoints of tests/data as Orbax fills one."""

import shutil
from pathlib import Path

from data_files import DATA

STEPS = DATA / "trained" / "qwen3-scanned" / "checkpoints"
CONFIG = str(DATA / "qwen3" / "hf")


class Run:
    """`RUN/checkpoints/`. Any number can be written: its content is that of a real step (0, 2 or 3)."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.checkpoints = home / "checkpoints"

    def write(self, step: int, content: int = 3) -> Path:
        """As Orbax on a disk: everything below a temporary name, then one rename."""
        temporary = self.checkpoints / f"{step}.orbax-checkpoint-tmp-7"
        shutil.copytree(STEPS / str(content), temporary)
        return temporary.rename(self.checkpoints / str(step))

    def delete(self, step: int) -> None:
        """As the trainer's retention."""
        shutil.rmtree(self.checkpoints / str(step))
