"""Memory that is used over and over: touching a fresh page costs more than copying into it.

A ring hands out contiguous ranges in a fixed order and takes them back in any; a range becomes free for the next round
when all before it are back. Bytes in flight are bounded by its size, whatever the ranges' sizes.
"""

import contextlib
import mmap
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # a cache line


def aligned(nbytes: int) -> int:
    """What a range of `nbytes` takes in a ring."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


@dataclass(slots=True, eq=False)
class Range:
    """A range that was handed out; `data` are its bytes."""

    start: int
    end: int
    data: NDArray[np.uint8]
    back: bool = False


class Ring:
    """Not thread-safe: the pipeline's lock guards it."""

    def __init__(self, nbytes: int) -> None:
        self.size = aligned(nbytes)
        # Anonymous and page-aligned; a page costs memory from its first use on.
        memory = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # a strided copy touches a page a row, more than the TLB knows
        self._memory = np.frombuffer(memory, np.uint8)
        self._out: deque[Range] = deque()
        self._head = 0

    @property
    def empty(self) -> bool:
        """Whether everything is back."""
        return not self._out

    def take(self, nbytes: int) -> Range | None:
        """A range of `nbytes`, or None until more is given back."""
        need = aligned(nbytes)
        start = self._place(need)
        if start is None:
            return None
        self._head = start + need
        taken = Range(start, self._head, self._memory[start : start + nbytes])
        self._out.append(taken)
        return taken

    def _place(self, need: int) -> int | None:
        if not self._out:
            return 0 if need <= self.size else None
        tail = self._out[0].start
        if self._head > tail:
            if self.size - self._head >= need:
                return self._head
            return 0 if tail >= need else None
        return self._head if tail - self._head >= need else None

    def give(self, taken: Range) -> None:
        """Take a range back."""
        taken.back = True
        while self._out and self._out[0].back:
            self._out.popleft()
