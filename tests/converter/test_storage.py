"""The pure functions of locations, and the local store."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtx2vllm.converter import storage
from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError, StorageError
from mtx2vllm.converter.storage import basename, join, normal, parent, posix, rangefile, store_for
from mtx2vllm.converter.storage.files import FileStore

STORE = FileStore()


@pytest.mark.parametrize(
    ("base", "names", "whole"),
    [
        ("gs://b", ("x",), "gs://b/x"),
        ("gs://b/", ("x/", "/y"), "gs://b/x/y"),
        ("gs://b/a//", ("", "z"), "gs://b/a/z"),
        ("gs://b/a b/é", ("ü.json",), "gs://b/a b/é/ü.json"),
        ("/", ("x",), "/x"),
        ("a/", ("b",), "a/b"),
        ("/a", ("/etc/passwd",), "/a/etc/passwd"),
        ("", ("x",), "x"),
        ("gs://b", (), "gs://b"),
    ],
)
def test_join(base: str, names: tuple[str, ...], whole: str) -> None:
    assert join(base, *names) == whole


@pytest.mark.parametrize(
    ("location", "above", "name"),
    [
        ("gs://b/a/c/", "gs://b/a", "c"),
        ("gs://b/a", "gs://b", "a"),
        ("gs://b/", "gs://b", ""),
        ("/a/b/", "/a", "b"),
        ("/a", "/", "a"),
        ("/", "/", ""),
        ("a", ".", "a"),
    ],
)
def test_parent_and_basename(location: str, above: str, name: str) -> None:
    assert (parent(location), basename(location)) == (above, name)


@given(
    st.sampled_from(["gs://b", "gs://b/p q", "/r", "rel"]), st.text(st.characters(exclude_characters="/\0"), min_size=1)
)
def test_a_joined_name_comes_apart_again(base: str, name: str) -> None:
    whole = join(base, name)
    assert (parent(whole), basename(whole)) == (base, name)
    assert normal(whole + "/") == whole


@pytest.mark.parametrize("location", ["s3://b/x", "gs://", "gs:///x", "gs:/b/x", "file:///x", "", "a\0b"])
def test_a_location_that_is_none_is_refused_in_one_sentence(location: str) -> None:
    with pytest.raises(InputError) as refused:
        store_for(location)
    assert len(refused.value.problems) == 1


def test_a_local_store_imports_no_google_library() -> None:
    code = "import sys; from mtx2vllm.converter.storage import store_for; store_for('x'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in loaded if name.split(".")[0] in {"google", "tensorstore", "requests", "jax", "numpy"}}


def test_create_refuses_what_exists_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = join(str(tmp_path), "deep", "m.json")
    made = STORE.create(path, b"{}")
    assert (made.size, STORE.stat(path)) == (2, made)
    with pytest.raises(LostRace):
        STORE.create(path, b"other")
    assert STORE.read(path) == b"{}"
    assert [entry.name for entry in STORE.listdir(parent(path))] == ["m.json"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_create_without_hard_links_still_has_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    STORE.create(str(tmp_path / "m"), b"{}")
    with pytest.raises(LostRace):
        STORE.create(str(tmp_path / "m"), b"{}")
    assert [entry.name for entry in STORE.listdir(str(tmp_path))] == ["m"]


RACE = """
import sys, time
from pathlib import Path
from mtx2vllm.converter.errors import LostRace
from mtx2vllm.converter.storage.files import FileStore
root, own = Path(sys.argv[1]), sys.argv[2].encode() * 100
(root / ("ready" + sys.argv[2])).touch()
while not (root / "go").exists():
    pass
for turn in range(20):
    try:
        FileStore().create(str(root / "turns" / str(turn)), own)
        print(turn)
    except LostRace:
        pass
"""


def test_of_racing_processes_exactly_one_creates(tmp_path: Path) -> None:
    racers = {
        str(n): subprocess.Popen([sys.executable, "-c", RACE, tmp_path, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(3)
    }
    while len(list(tmp_path.glob("ready*"))) < len(racers):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    won = {(turn, name) for name, racer in racers.items() for turn in racer.communicate(timeout=60)[0].split()}
    assert sorted(int(turn) for turn, _ in won) == list(range(20))
    assert all(STORE.read(str(tmp_path / "turns" / turn)) == name.encode() * 100 for turn, name in won)


def test_replace_and_delete_by_generation(tmp_path: Path) -> None:
    path = str(tmp_path / "lease")
    first = STORE.replace(path, b"1", generation=0)
    with pytest.raises(LostRace):
        STORE.replace(path, b"x", generation=0)
    second = STORE.replace(path, b"2", generation=first.generation)
    assert first.generation != second.generation
    for stale in (first.generation, second.generation + 1):
        with pytest.raises(LostRace):
            STORE.replace(path, b"x", generation=stale)
        with pytest.raises(LostRace):
            STORE.delete(path, generation=stale)
    assert STORE.read(path) == b"2"
    STORE.delete(path, generation=second.generation)
    STORE.delete(path)
    assert STORE.stat(path) is None


def test_a_reader_of_a_replaced_file_sees_one_whole_text(tmp_path: Path) -> None:
    path, stop = str(tmp_path / "pin"), threading.Event()
    STORE.replace(path, b"a" * 5000)

    def rewrite() -> None:
        while not stop.is_set():
            for letter in (b"a", b"b"):
                STORE.replace(path, letter * 5000)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = {STORE.read(path) for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= {b"a" * 5000, b"b" * 5000}


def test_listing_walking_and_what_is_not_there(tmp_path: Path) -> None:
    for name in ("10/m", "9/c/x", "9/a", "v1/x", "v10/x"):
        STORE.create(join(str(tmp_path), name), b"1")
    (tmp_path / "dangling").symlink_to("nowhere")
    names = [(entry.name, entry.is_dir) for entry in STORE.listdir(f"{tmp_path}/")]
    assert names == [("10", True), ("9", True), ("v1", True), ("v10", True)]
    assert list(STORE.walk(f"{tmp_path}/9")) == ["a", "c/x"]
    assert STORE.listdir(str(tmp_path / "none")) == [] == STORE.listdir(str(tmp_path / "9/a"))
    assert list(STORE.walk(str(tmp_path / "none"))) == []
    assert STORE.stat(str(tmp_path)) is None
    for missing in ("none", "9/a/below"):
        assert STORE.stat(str(tmp_path / missing)) is None
        with pytest.raises(FileNotFoundError):
            STORE.read(str(tmp_path / missing))
        STORE.delete(str(tmp_path / missing))


def test_ranges_are_read_exactly(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    STORE.create(path, bytes(range(100)))
    out = bytearray(10)
    STORE.read_into(path, 90, memoryview(out))
    assert out == bytes(range(90, 100)) == STORE.read(path, 90)
    assert STORE.read(path, 3, 4) == bytes(range(3, 7))
    for start, length in ((91, 10), (200, 1)):
        with pytest.raises(EOFError):
            STORE.read(path, start, length)


def test_a_whole_version_is_deleted_and_nothing_beside_it(tmp_path: Path) -> None:
    for name in ("v1/canonical/a", "v1/b", "v10/a"):
        STORE.create(join(str(tmp_path), name), b"1")
    (tmp_path / "v1/link").symlink_to(tmp_path / "v10")
    assert STORE.delete_all(join(str(tmp_path), "v1")) == 3
    assert list(STORE.walk(str(tmp_path))) == ["v10/a"]
    assert STORE.delete_all(join(str(tmp_path), "v1")) == 0


def test_leftovers_are_cleaned_and_nothing_else(tmp_path: Path) -> None:
    for name in (".mtx2vllm-1234", ".mtx2vllm-parts/a/0", "mtx2vllm.json", ".pin.json"):
        STORE.create(join(str(tmp_path), name), b"1")
    assert STORE.clean_leftovers(str(tmp_path)) == 2
    assert list(STORE.walk(str(tmp_path))) == [".pin.json", "mtx2vllm.json"]


def test_ranges_written_by_threads_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rangefile, "WINDOW", 10_000)
    whole = os.urandom(200_003)
    path = join(str(tmp_path), "new", "model.safetensors")
    writer = STORE.writer(path, len(whole))
    pieces = [(start, whole[start : start + 777]) for start in range(0, len(whole), 777)]

    def write(mine: list[tuple[int, bytes]]) -> None:
        for start, piece in mine:
            buffer = bytearray(piece)
            writer.write(start, memoryview(buffer))
            buffer[:] = bytes(len(buffer))  # reused at once

    threads = [threading.Thread(target=write, args=(pieces[::-1][n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.commit() == STORE.stat(path)
    writer.abort()
    assert STORE.read(path) == whole


@pytest.mark.parametrize("missing", [("fallocate",), ("sync_file_range",), ("fallocate", "sync_file_range")])
def test_systems_without_early_write_back_or_allocation_write_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    real = posix._libc
    monkeypatch.setattr(posix, "_libc", lambda name: None if name in missing else real(name))
    monkeypatch.setattr(rangefile, "WINDOW", 1000)
    whole, path = os.urandom(10_001), str(tmp_path / "f")
    writer = STORE.writer(path, len(whole))
    for start in range(0, len(whole), 700):
        writer.write(start, memoryview(whole)[start : start + 700])
    writer.commit()
    assert STORE.read(path) == whole


def test_a_mapped_file_keeps_its_bytes_when_it_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with path.open("rb") as mapped:
        writer = STORE.writer(str(path), 4)
        writer.write(0, memoryview(b"newer"[:4]))
        writer.commit()
        assert mapped.read() == b"old"
    assert path.read_bytes() == b"newe"


def test_an_aborted_or_incomplete_file_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    writer = STORE.writer(path, 4)
    writer.write(0, memoryview(b"ab"))
    with pytest.raises(ValueError, match="outside"):
        writer.write(3, memoryview(b"ab"))
    with pytest.raises(Mtx2vllmError, match="2 of 4 bytes"):
        writer.commit()
    STORE.writer(path, 4).abort()
    assert list(STORE.walk(str(tmp_path))) == []


def test_of_two_writers_of_one_file_the_second_learns_that_it_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    writers = [STORE.writer(path, 1) for _ in range(2)]
    for writer, byte in zip(writers, (b"1", b"2"), strict=True):
        writer.write(0, memoryview(byte))
    assert not Path(path).exists()
    writers[0].commit()
    with pytest.raises(LostRace):
        writers[1].commit()
    assert STORE.read(path) == b"1"
    assert list(STORE.walk(str(tmp_path))) == ["f"]


@pytest.mark.parametrize("call", ["allocate", "pwrite"])
def test_a_full_disk_is_one_sentence_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((posix, "allocate", full) if call == "allocate" else (os, "pwrite", full)))
    with pytest.raises(Mtx2vllmError, match=r"disk is full \(4,096 bytes asked for, [\d,]+ bytes are free\)") as caught:
        STORE.writer(str(tmp_path / "f"), 4096).write(0, memoryview(bytes(4096)))
    assert caught.value.exit_status == 1
    if call == "allocate":
        assert list(STORE.walk(str(tmp_path))) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory that can be too small")
def test_more_than_the_disk_holds_is_met_before_the_work() -> None:
    path = f"/dev/shm/mtx2vllm-test-{os.getpid()}"
    with pytest.raises(Mtx2vllmError, match="disk is full"):
        STORE.writer(path, 1 << 50)
    assert not Path(path).exists()


def test_writing_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    for write in (lambda path: STORE.create(path, b"x"), lambda path: STORE.writer(path, 1)):
        with pytest.raises(StorageError, match=r"cannot be written|exists"):
            write(str(tmp_path / "f" / "below"))


def test_tensorstore_reads_what_the_store_wrote(tmp_path: Path) -> None:
    import tensorstore as ts

    STORE.create(str(tmp_path / "d" / "k"), b"value")
    assert ts.KvStore.open(STORE.kvstore(str(tmp_path / "d"))).result()["k"] == b"value"


def test_extents_are_merged() -> None:
    assert rangefile.merged([(5, 6), (0, 2), (2, 4)]) == [(0, 4), (5, 6)]
    assert rangefile.merged([(n, n + 1) for n in range(0, 1000, 2)]) == [(0, 999)]
    assert storage.LEFTOVER.startswith(".")
