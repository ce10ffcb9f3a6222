"""What is done with a slab: gathered, streamed or spilled (`schedule` says which, `pipeline` supplies threads and memory)."""

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial as bind
from typing import IO, Any, Self

from numpy.typing import NDArray

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.execute.digest import Digests
from mtx2vllm.converter.execute.pipeline import Bytes, Item, Pipeline, Task
from mtx2vllm.converter.execute.ring import Range
from mtx2vllm.converter.execute.scatter import Scatter, clear_padding
from mtx2vllm.converter.execute.schedule import Stage
from mtx2vllm.converter.execute.slabs import Load, Part
from mtx2vllm.converter.plans import Leaf, Plan
from mtx2vllm.converter.storage import GuestWriter, RangeWriter
from mtx2vllm.converter.storage.retry import looked_at_twice

Open = Callable[[Leaf], Any]  # gives the tensorstore.TensorStore of a leaf
Places = Mapping[int, tuple[RangeWriter | GuestWriter, int]]
Progress = Callable[[int], None]
Input = tuple[Range, NDArray[Any], Callable[[], None]]  # memory, the array in it, what waits until it is filled


class Steps:
    """Hands stages to a pipeline. Use as a context: leaving it gives scratch space back.

    Args:
        plan: what to do.
        read: opens a leaf.
        places: of each tensor that is written: its file, and where it begins there.
        scratch: directory of spill files; None: the system's.
        progress: is told of every written range, one call at a time.
        partial: tensors of which only some rows are written; they get no digest.
    """

    def __init__(
        self,
        plan: Plan,
        read: Open,
        places: Places,
        scratch: str | None,
        progress: Progress,
        partial: frozenset[int] = frozenset(),
    ) -> None:
        self.digests = Digests(plan, partial)
        self._plan, self._places, self._scratch, self._progress = plan, places, scratch, progress
        self._telling = threading.Lock()
        self._open, self._stores = read, dict[str, Any]()
        self._spilled: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spilled is not None:
            self._spilled.close()

    # -- the three ways of a slab

    def start(self, stage: Stage, pipeline: Pipeline) -> None:
        """Hand a stage to the pipeline. A spill returns when its pieces are on their way back from scratch."""
        {"gather": self._gather, "stream": self._stream, "spill": self._spill}[stage.how](stage, pipeline)

    def _gather(self, stage: Stage, pipeline: Pipeline) -> None:
        slab = stage.slab
        items = [(p, self._item(p, max(1, len(slab.loads)))) for p in slab.parts]
        pipeline.announce([item for _, item in items], together=True)
        if not slab.loads:
            pipeline.submit(Task(_nothing, [(item, None) for _, item in items]))
        for load in slab.loads:
            [(memory, chunk, ready)] = self._decode([load], pipeline)
            scatter = Scatter(self._plan, slab.moves, load)
            steps = [(i, bind(scatter.fill, p, chunk=chunk) if scatter.reaches(p) else None) for p, i in items]
            pipeline.submit(Task(ready, steps, [memory]))

    def _stream(self, stage: Stage, pipeline: Pipeline) -> None:
        slab = stage.slab
        items = [(p, self._item(p, 1)) for p in slab.parts]
        pipeline.announce([item for _, item in items], together=False)
        inputs = self._decode(slab.loads, pipeline)
        scatters = [(Scatter(self._plan, slab.moves, load), i[1]) for load, i in zip(slab.loads, inputs, strict=True)]

        def fill(part: Part, data: Bytes) -> None:
            for scatter, chunk in scatters:
                scatter.fill(part, data, chunk)

        def ready() -> None:
            for _, _, wait in inputs:
                wait()

        pipeline.submit(Task(ready, [(i, bind(fill, p)) for p, i in items], [memory for memory, _, _ in inputs]))

    def _spill(self, stage: Stage, pipeline: Pipeline) -> None:
        slab, file = stage.slab, self._scratch_file()
        scatters: list[Scatter] = []
        begin, total = {}, 0
        for p in slab.parts:
            begin[p], total = total, total + p.nbytes
        ends = dict(begin)
        for load in slab.loads:
            scatter = Scatter(self._plan, slab.moves, load)
            pieces = [(p, scatter.size(p)) for p in slab.parts]
            self._pack(scatter, [(p, n, ends[p]) for p, n in pieces if n], file, pipeline)
            scatters.append(scatter)
            for p, n in pieces:
                ends[p] += n
        pipeline.drain()
        for p in slab.parts:
            self._assemble(p, begin[p], [(s, n) for s in scatters if (n := s.size(p))], file, pipeline)
        pipeline.drain()

    def _scratch_file(self) -> IO[bytes]:
        """One for all spills, without a name. Each overwrites the one before: a page of the cache that is there already
        takes bytes at 15 GB/s, a new one at 0.4 to 3 (measured)."""
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile(dir=self._scratch, buffering=0)  # noqa: SIM115 -- closed by __exit__
        return self._spilled

    def _pack(
        self, scatter: Scatter, pieces: Sequence[tuple[Part, int, int]], file: IO[bytes], pipeline: Pipeline
    ) -> None:
        """Rearrange one chunk into pieces (part, bytes, place in the scratch file)."""
        limit = pipeline.part_bytes // 2
        batches: list[list[tuple[Part, int, int]]] = [[]]
        for piece in pieces:
            if batches[-1] and sum(n for _, n, _ in batches[-1]) + piece[1] > limit:
                batches.append([])
            batches[-1].append(piece)
        [(memory, chunk, ready)] = self._decode([scatter.load], pipeline)
        items = []
        for batch in batches:
            item = Item(sum(n for _, n, _ in batch), 1, bind(_save, file.fileno(), batch))
            items.append((item, bind(_pack, scatter, batch, chunk)))
        pipeline.announce([item for item, _ in items], together=False)
        pipeline.submit(Task(ready, items, [memory]))

    def _assemble(
        self, p: Part, begin: int, found: Sequence[tuple[Scatter, int]], file: IO[bytes], pipeline: Pipeline
    ) -> None:
        """Put a part together from its pieces in the scratch file."""
        item = self._item(p, 1)
        pipeline.announce([item], together=False)
        [memory] = pipeline.take_chunks([sum(n for _, n in found)])

        def fill(data: Bytes) -> None:
            end = 0
            for scatter, n in found:
                scatter.unpack(p, data, memory.data[end : end + n])
                end += n

        pipeline.submit(Task(bind(_load, file.fileno(), memory.data, begin), [(item, fill)], [memory]))

    # -- in and out

    def _decode(self, loads: Sequence[Load], pipeline: Pipeline) -> list[Input]:
        """Start reading."""
        import tensorstore as ts

        found: list[Input] = []
        for load, memory in zip(loads, pipeline.take_chunks([load.nbytes for load in loads]), strict=True):
            chunk = memory.data.view(load.leaf.dtype).reshape(load.shape)
            store = self._store(load.leaf)
            start = bind(ts.array(chunk).write, store[tuple(slice(*r) for r in load.box)])
            found.append((memory, chunk, bind(_wait, load, start, start())))
        return found

    def _store(self, leaf: Leaf) -> Any:
        if leaf.key not in self._stores:
            self._stores = {leaf.key: self._open(leaf), **dict(list(self._stores.items())[:7])}
        return self._stores[leaf.key]

    def _item(self, p: Part, tasks: int) -> Item:
        """A part on its way to its place in its file."""
        return Item(
            p.nbytes,
            tasks,
            write=bind(self._write, p),
            hash=bind(self.digests.add, p),
            finish=bind(clear_padding, self._plan, p),
        )

    def _write(self, p: Part, data: Bytes) -> None:
        file, offset = self._places[p.tensor]
        if p.nbytes:
            file.write(offset + p.start, memoryview(data))
        with self._telling:
            self._progress(p.nbytes)


def _nothing() -> None:
    """No input to wait for."""


def _wait(load: Load, start: Callable[[], Any], future: Any) -> None:
    """Until a chunk is decoded. TensorStore raises ValueError for everything; the text's first word tells what."""
    try:
        looked_at_twice(start, future)
    except (ValueError, OSError) as error:
        at = [low for low, _ in load.box]
        raise InputError(
            f"{load.leaf.key}: the stored values at {at} cannot be read, so the checkpoint's data files are damaged, "
            f"incomplete or out of reach; copy the step again ({str(error).splitlines()[0][:300]})"
        ) from error


def _pack(scatter: Scatter, batch: Sequence[tuple[Part, int, int]], chunk: NDArray[Any], data: Bytes) -> None:
    end = 0
    for p, n, _ in batch:
        scatter.pack(p, data[end : end + n], chunk)
        end += n


def _save(descriptor: int, batch: Sequence[tuple[Part, int, int]], data: Bytes) -> None:
    end = 0
    for _, n, place in batch:
        view, done = memoryview(data[end : end + n]), 0
        while done < n:
            done += os.pwrite(descriptor, view[done:], place + done)
        end += n


def _load(descriptor: int, data: Bytes, place: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], place + done)
        if not count:
            raise OSError("the scratch file is shorter than what was written into it")
        done += count
