"""The cache by itself: resumption, room, and several processes on one directory."""

import os
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from mtx2vllm.converter.errors import InputError
from mtx2vllm.reload.cache import Cache

DATA = bytes(range(256)) * 40


def key(n: int) -> str:
    return f"{n:064x}"


def content(calls: list[int], data: bytes = DATA, fail_after: int | None = None):
    def fill(start: int, put) -> None:
        calls.append(start)
        for offset in range(start, len(data), 1000):
            if fail_after is not None and offset >= fail_after:
                raise OSError("the connection broke")
            put(memoryview(data)[offset : offset + 1000])

    return fill


def test_a_fetch_that_broke_goes_on_where_it_stopped(tmp_path: Path) -> None:
    cache, calls = Cache(str(tmp_path), 1 << 20), []
    with pytest.raises(OSError, match="broke"):
        cache.get(key(1), len(DATA), content(calls, fail_after=4000), resumable=True)
    path, found = cache.get(key(1), len(DATA), content(calls), resumable=True)
    assert calls == [0, 4000] and Path(path).read_bytes() == DATA and found == blake3(DATA).hexdigest()
    assert cache.get(key(1), len(DATA), content(calls), resumable=True) == (path, found) and len(calls) == 2


def test_what_is_not_resumable_begins_anew(tmp_path: Path) -> None:
    cache, calls = Cache(str(tmp_path), 1 << 20), []
    with pytest.raises(OSError, match="broke"):
        cache.get(key(1), len(DATA), content(calls, fail_after=4000))
    path, _ = cache.get(key(1), len(DATA), content(calls))
    assert calls == [0, 0] and Path(path).read_bytes() == DATA


@pytest.mark.parametrize("rest", [b"x" * 20_000, DATA[:5000], b""])
def test_a_part_of_another_length(tmp_path: Path, rest: bytes) -> None:
    cache, calls = Cache(str(tmp_path), 1 << 20), []
    (tmp_path / f"{key(1)}.part").write_bytes(rest)
    path, found = cache.get(key(1), len(DATA), content(calls), resumable=True)
    assert Path(path).read_bytes() == DATA and found == blake3(DATA).hexdigest()


def test_a_damaged_part_is_told_by_its_digest(tmp_path: Path) -> None:
    """The name carries what the bytes are; the caller compares it with what they should be, and drops them."""
    cache = Cache(str(tmp_path), 1 << 20)
    (tmp_path / f"{key(1)}.part").write_bytes(b"wrong" * 100)
    path, found = cache.get(key(1), len(DATA), content([]), resumable=True)
    assert found != blake3(DATA).hexdigest()
    cache.drop(path)
    assert cache.get(key(1), len(DATA), content([]), resumable=True)[1] == blake3(DATA).hexdigest()


def test_the_least_recently_used_go_and_what_is_served_goes_last(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 4 * len(DATA))
    for n in range(4):
        path, _ = cache.get(key(n), len(DATA), content([]))
        os.utime(path, (n, n))
    cache.get(key(0), len(DATA), content([]))  # used again
    (tmp_path / "unrelated.txt").write_text("somebody else's")
    cache.make_room({key(9): 2 * len(DATA)}, keep=[key(1)])
    left = {int(path.name.partition("-")[0], 16) for path in tmp_path.glob("0*")}
    assert left == {0, 1} and (tmp_path / "unrelated.txt").exists()
    cache.make_room({key(9): 4 * len(DATA)}, keep=[key(1)])
    assert not list(tmp_path.glob("0*"))
    with pytest.raises(InputError, match="MTX2VLLM_CACHE_SIZE"):
        cache.make_room({key(9): 4 * len(DATA) + 1})


def test_what_is_there_needs_no_room(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 2 * len(DATA))
    for n in range(2):
        cache.get(key(n), len(DATA), content([]))
    cache.make_room({key(0): len(DATA), key(1): len(DATA)})
    assert len(list(tmp_path.iterdir())) == 2


def test_ranks_that_share_a_directory_fetch_once(tmp_path: Path) -> None:
    calls: list[int] = []
    gate = threading.Barrier(4)
    found = []

    def rank() -> None:
        gate.wait()
        found.append(Cache(str(tmp_path), 1 << 20).get(key(1), len(DATA), content(calls), resumable=True))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert calls == [0] and len(set(found)) == 1 and len(found) == 4
    assert [path.name for path in tmp_path.iterdir()] == [Path(found[0][0]).name]
