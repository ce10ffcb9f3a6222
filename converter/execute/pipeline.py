"""The threads and the memory of a run.

    feeder (the caller)   takes chunk memory, starts TensorStore's reads, hands tasks to the workers
    workers               wait for a decoded chunk, scatter it into items, give the chunk's memory back
    hasher                takes finished items in their order: a tensor's digest needs its bytes in order
    writers               take finished items as they come

An `Item` is a range of the part ring on its way out. Items get their memory in the order in which they were announced,
as soon as earlier ones have left; a worker that comes too early waits. Nobody who must give memory back ever waits for
memory behind what it holds, so any budget that the schedule accepts comes to an end.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mtx2vllm.converter.execute.ring import Range, Ring, aligned

Bytes = NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class Item:
    """Bytes that `tasks` tasks fill, and what happens to them then. `hash` and `write` may run at the same time."""

    nbytes: int
    tasks: int
    write: Callable[[Bytes], None]
    hash: Callable[[Bytes], None] | None = None
    finish: Callable[[Bytes], None] | None = None  # by the worker that fills the last byte
    memory: Range | None = None
    outlets: int = 0


@dataclass(eq=False, slots=True)
class Task:
    """Work for a worker: `steps` are pairs of an item and how to fill it (None: nothing of it comes from here)."""

    ready: Callable[[], None]  # waits for the input
    steps: Sequence[tuple[Item, Callable[[Bytes], None] | None]]
    inputs: Sequence[Range] = ()


@dataclass(eq=False)
class _State:
    """Everything that the lock guards."""

    tasks: deque[Task] = field(default_factory=deque)
    waiting: deque[Item] = field(default_factory=deque)  # for memory, in order
    hashing: deque[Item] = field(default_factory=deque)  # announced and not yet hashed, in order
    writing: deque[Item] = field(default_factory=deque)  # full
    open_items: int = 0
    closed: bool = False
    error: BaseException | None = None


class Pipeline:
    """Use as a context: leaving it waits until everything is out, and raises what any thread raised."""

    def __init__(self, chunk_ring: int, part_ring: int, workers: int, writers: int) -> None:
        self._changed = threading.Condition()
        self._chunks, self._parts = Ring(chunk_ring), Ring(part_ring)
        self._state = _State()
        self.part_bytes = self._parts.size
        roles = [self._work] * workers + [self._hash] + [self._write] * writers
        self._threads = [threading.Thread(target=self._guarded, args=(role,), daemon=True) for role in roles]

    def __enter__(self) -> "Pipeline":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._changed:
            self._state.closed = True
            if error is not None and self._state.error is None:
                self._state.error = error
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if error is None and self._state.error is not None:
            raise self._state.error

    # -- the feeder's side

    def announce(self, items: Sequence[Item], together: bool) -> None:
        """Queue items for memory. `together`: all must be held at once, because none is full before the last task."""
        with self._changed:
            needed = sum(aligned(i.nbytes) for i in items)
            largest = max((aligned(i.nbytes) for i in items), default=0)
            if together and needed + largest > self._parts.size:
                # It only fits from the ring's begin on: a gap at the end might be what is missing.
                self._until(lambda: self._parts.empty and not self._state.waiting)
            for item in items:
                item.outlets = 2 if item.hash else 1
                self._state.open_items += 1
                self._state.waiting.append(item)
                if item.hash:
                    self._state.hashing.append(item)
            self._supply()

    def take_chunks(self, sizes: Sequence[int]) -> list[Range]:
        """Memory for the inputs of one task; waits until there is some."""
        taken: list[Range] = []
        with self._changed:
            needed = [aligned(n) for n in sizes]
            if len(sizes) > 1 and sum(needed) + max(needed) > self._chunks.size:
                self._until(lambda: self._chunks.empty)  # as in `announce`
            for nbytes in sizes:
                while (found := self._chunks.take(nbytes)) is None:
                    self._changed.wait()
                    self._check()
                taken.append(found)
        return taken

    def submit(self, task: Task) -> None:
        """Hand a task to the workers; they take tasks in this order."""
        with self._changed:
            self._check()
            self._state.tasks.append(task)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all announced items are out."""
        with self._changed:
            self._until(lambda: self._state.open_items == 0)

    # -- the threads

    def _guarded(self, role: Callable[[], None]) -> None:
        try:
            role()
        except BaseException as error:
            with self._changed:
                if self._state.error is None:
                    self._state.error = error
                self._changed.notify_all()

    def _work(self) -> None:
        for task in self._next(self._state.tasks):
            task.ready()
            for item, fill in task.steps:
                if fill is not None:
                    fill(self._memory_of(item))
                self._filled(item)
            with self._changed:
                for taken in task.inputs:
                    self._chunks.give(taken)
                self._changed.notify_all()

    def _memory_of(self, item: Item) -> Bytes:
        with self._changed:
            self._until(lambda: item.memory is not None)
            assert item.memory is not None
            return item.memory.data

    def _filled(self, item: Item) -> None:
        with self._changed:
            item.tasks -= 1
            if item.tasks:
                return
        data = self._memory_of(item)
        if item.finish:
            item.finish(data)
        with self._changed:
            self._state.writing.append(item)
            item.tasks = -1  # full, and the hasher may see it
            self._changed.notify_all()

    def _hash(self) -> None:
        state = self._state
        while True:
            with self._changed:
                self._until(lambda: (state.hashing and state.hashing[0].tasks < 0) or self._finished())
                if not state.hashing:
                    return
                item = state.hashing.popleft()
            assert item.memory is not None and item.hash is not None
            item.hash(item.memory.data)
            self._out(item)

    def _write(self) -> None:
        for item in self._next(self._state.writing):
            assert item.memory is not None
            item.write(item.memory.data)
            self._out(item)

    def _out(self, item: Item) -> None:
        with self._changed:
            item.outlets -= 1
            if item.outlets == 0 and item.memory is not None:
                self._parts.give(item.memory)
                self._state.open_items -= 1
                self._supply()

    # -- with the lock held

    def _next[T](self, queue: deque[T]) -> Iterator[T]:
        while True:
            with self._changed:
                self._until(lambda: bool(queue) or self._finished())
                if not queue:
                    return
                item = queue.popleft()
            yield item

    def _finished(self) -> bool:
        return self._state.closed and not self._state.open_items and not self._state.tasks

    def _supply(self) -> None:
        waiting = self._state.waiting
        while waiting:
            taken = self._parts.take(waiting[0].nbytes)
            if taken is None:
                break
            waiting.popleft().memory = taken
        self._changed.notify_all()

    def _check(self) -> None:
        if self._state.error is not None:
            raise self._state.error

    def _until(self, condition: Callable[[], object]) -> None:
        self._check()
        while not condition():
            self._changed.wait()
            self._check()
