"""The verbs against the real emulator: names, preconditions, ranges, parts."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorstore as ts

from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError, StorageError
from mtx2vllm.converter.storage import crc32c, gs_http, gs_upload, join, parent, store_for
from mtx2vllm.converter.storage.gs import GsStore

NAMES = ("v1/x", "v10/x", "v1/sub dir/ü 漢.json", "v1/#h?q=1&a%2Fb", "top", "v1/.hidden")


def write(store: GsStore, path: str, data: bytes, piece: int, seed: int = 0) -> object:
    """Write in pieces of shuffled order from three threads."""
    writer = store.writer(path, len(data))
    starts = list(range(0, len(data), piece))
    random.Random(seed).shuffle(starts)

    def some(mine: list[int]) -> None:
        for start in mine:
            buffer = bytearray(data[start : start + piece])
            writer.write(start, memoryview(buffer))
            buffer[:] = bytes(len(buffer))

    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(some, [starts[n::3] for n in range(3)]))
    except BaseException:
        writer.abort()
        raise
    return writer.commit()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs_upload, "PART", 1000)
    monkeypatch.setattr(gs_upload, "PENDING", 3000)
    monkeypatch.setattr(gs_upload, "IN_FLIGHT", 4000)


def test_every_name_is_listed_walked_and_read(store: GsStore, bucket: str) -> None:
    for name in NAMES:
        store.create(join(bucket, name), name.encode())
    assert list(store.walk(bucket)) == sorted(NAMES)
    for root in (bucket, f"{bucket}/"):
        assert [(e.name, e.is_dir) for e in store.listdir(root)] == [("top", False), ("v1", True), ("v10", True)]
    for version in ("v1", "v1/"):
        listed = [(e.name, e.is_dir, e.size) for e in store.listdir(join(bucket, version))]
        assert listed == [
            ("#h?q=1&a%2Fb", False, len(NAMES[3])),
            (".hidden", False, len(NAMES[5])),
            ("sub dir", True, 0),
            ("x", False, 4),
        ]
    for name in NAMES:
        assert store.read(join(bucket, name)) == name.encode()
    assert store.listdir(join(bucket, "v")) == [] == list(store.walk(join(bucket, "v")))
    assert store.delete_all(join(bucket, "v1")) == 4
    assert list(store.walk(bucket)) == ["top", "v10/x"]


def test_an_empty_bucket_and_a_bucket_as_a_file(store: GsStore, bucket: str) -> None:
    assert (store.listdir(bucket), list(store.walk(bucket)), store.stat(bucket)) == ([], [], None)
    with pytest.raises(StorageError, match="is a bucket, not an object"):
        store.create(bucket, b"")


def test_one_listing_a_poll_however_many_objects_lie_inside(faulty: GsStore, broken: object, bucket: str) -> None:
    for step in (9, 10):
        for n in range(20):
            faulty.create(join(bucket, f"{step}/{n}"), b"")
    before = sum(broken.requests.values())
    assert [e.name for e in faulty.listdir(bucket)] == ["10", "9"]
    assert sum(broken.requests.values()) - before == 1


def test_reads_share_their_connections(faulty: GsStore, broken: object, bucket: str) -> None:
    path = join(bucket, "f")
    faulty.create(path, bytes(1000))
    before = broken.connections
    for start in range(20):
        faulty.read(path)
        faulty.read(path, start, 100)
    assert broken.connections - before <= 1


def test_create_and_replace_by_generation(store: GsStore, bucket: str) -> None:
    path = join(bucket, "100", "mtx2vllm.json")
    first = store.create(path, b"{}")
    assert store.stat(path) == first
    for refused in (lambda: store.create(path, b"x"), lambda: store.replace(path, b"x", 0)):
        with pytest.raises(LostRace):
            refused()
    second = store.replace(path, b"{2}", first.generation)
    for stale in (lambda: store.replace(path, b"x", first.generation), lambda: store.delete(path, first.generation)):
        with pytest.raises(LostRace):
            stale()
    assert store.read(path) == b"{2}"
    store.delete(path, second.generation)
    store.delete(path)
    assert store.stat(path) is None


def test_of_racing_writers_exactly_one_creates(server: str, bucket: str) -> None:
    for turn in range(5):
        path, won, start = join(bucket, str(turn)), [], threading.Barrier(6)

        def race(own: bytes, path: str = path, won: list = won, start: threading.Barrier = start) -> None:
            store = GsStore(server)
            start.wait()
            try:
                store.create(path, own)
            except LostRace:
                return
            won.append(own)

        racers = [threading.Thread(target=race, args=(b"%d" % n * 50,)) for n in range(6)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert [GsStore(server).read(path)] == won


def test_ranges_are_read_exactly(store: GsStore, bucket: str) -> None:
    path = join(bucket, "f")
    store.create(path, bytes(range(100)))
    out = bytearray(10)
    store.read_into(path, 90, memoryview(out))
    assert out == bytes(range(90, 100)) == store.read(path, 90)
    assert store.read(path, 3, 4) == bytes(range(3, 7))
    assert store.read(path, 100) == store.read(path, 3, 0) == b""
    for start, length in ((91, 10), (100, 1), (200, 1)):
        with pytest.raises(EOFError):
            store.read(path, start, length)
    for missing in (
        lambda: store.read(path + "x"),
        lambda: store.read(path + "x", 0, 0),
        lambda: store.read(parent(path) + "/f/x", 1, 1),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    store.create(path + "e", b"")
    assert store.read(path + "e") == b""


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("size", "piece"), [(0, 1), (1, 1), (999, 10), (1000, 1000), (70_001, 777), (70_000, 5000)])
def test_an_object_written_in_ranges_is_composed_bit_by_bit(store: GsStore, bucket: str, size: int, piece: int) -> None:
    data, path = os.urandom(size), join(bucket, "v 1/canonical/model.safetensors")
    stat = write(store, path, data, piece)
    assert stat == store.stat(path)
    assert store.read(path) == data
    assert list(store.walk(bucket)) == ["v 1/canonical/model.safetensors"]
    assert (store._uploads.pending, store._uploads._under_way) == (0, 0)


@pytest.mark.usefixtures("small_parts")
def test_what_waits_in_memory_is_bounded_for_all_writers_together(store: GsStore, bucket: str) -> None:
    writers = [store.writer(join(bucket, str(n)), 10_000) for n in range(8)]
    most = 0
    for start in range(0, 10_000, 100):
        for writer in writers:
            writer.write(start, memoryview(b"x" * 100))
            most = max(most, store._uploads.pending)
    assert 0 < most <= gs_upload.PENDING
    for n, writer in enumerate(writers):
        writer.commit()
        assert store.read(join(bucket, str(n))) == b"x" * 10_000


@pytest.mark.usefixtures("small_parts")
def test_an_aborted_or_incomplete_object_leaves_nothing(store: GsStore, bucket: str) -> None:
    for ranges in ((), ((0, 1500),), ((0, 1500), (1000, 1000))):
        writer = store.writer(join(bucket, "f"), 2000)
        for start, length in ranges:
            writer.write(start, memoryview(bytes(length)))
        with pytest.raises(Mtx2vllmError, match="exactly once"):
            writer.commit()
    with pytest.raises(ValueError, match="outside"):
        writer.write(1999, memoryview(bytes(2)))
    writer = store.writer(join(bucket, "f"), 2000)
    writer.write(0, memoryview(bytes(1999)))
    writer.abort()
    assert list(store.walk(bucket)) == []
    assert (store._uploads.pending, store._uploads._under_way) == (0, 0)


@pytest.mark.usefixtures("small_parts")
def test_of_two_writers_of_one_object_the_second_loses(store: GsStore, bucket: str) -> None:
    path = join(bucket, "f")
    writers = [store.writer(path, 3000) for _ in range(2)]
    for n, writer in enumerate(writers):
        writer.write(0, memoryview(bytes([n]) * 3000))
    writers[1].commit()
    with pytest.raises(LostRace):
        writers[0].commit()
    assert store.read(path) == b"\x01" * 3000
    assert list(store.walk(bucket)) == ["f"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("meanwhile", ["nothing", "deleted", "replaced"])
def test_what_was_there_stays_until_the_new_object_is_whole(store: GsStore, bucket: str, meanwhile: str) -> None:
    path = join(bucket, "f")
    store.create(path, b"old")
    writer = store.writer(path, 3000)
    writer.write(0, memoryview(bytes(3000)))
    assert store.read(path) == b"old"
    if meanwhile == "replaced":
        store.replace(path, b"theirs")
        with pytest.raises(LostRace):
            writer.commit()
        assert store.read(path) == b"theirs"
        return
    if meanwhile == "deleted":
        store.delete(path)
    writer.commit()
    assert store.read(path) == bytes(3000)


def test_a_killed_writer_leaves_only_what_the_next_run_cleans(store: GsStore, server: str, bucket: str) -> None:
    code = (
        "import os, sys; from mtx2vllm.converter.storage import gs_upload; gs_upload.PART = 1000\n"
        "from mtx2vllm.converter.storage import store_for\n"
        "store = store_for(sys.argv[1]); store.create(sys.argv[1] + '/claim', b'{}')\n"
        "w = store.writer(sys.argv[1] + '/canonical/m', 9000); w.write(0, memoryview(bytes(8000)))\n"
        "[sent.result() for sent in w._sent]; os.kill(os.getpid(), 9)"
    )
    version = join(bucket, "100")
    ended = subprocess.run([sys.executable, "-c", code, version], env={**os.environ}, check=False)
    assert ended.returncode == -9
    left = list(store.walk(version))
    assert len(left) == 9
    assert [e.name for e in store.listdir(join(version, "canonical"))] == [".mtx2vllm-parts"]
    assert store.clean_leftovers(version, ("", "canonical")) == 8
    assert list(store.walk(version)) == ["claim"]


@pytest.mark.usefixtures("small_parts")
def test_parts_that_another_run_has_cleaned_are_a_lost_race(store: GsStore, bucket: str) -> None:
    writer = store.writer(join(bucket, "v/f"), 3000)
    writer.write(0, memoryview(bytes(3000)))
    writer._flush()
    assert store.clean_leftovers(join(bucket, "v")) == 3
    with pytest.raises(LostRace, match="cleaned up"):
        writer.commit()


def test_more_than_one_request_can_carry(store: GsStore, bucket: str) -> None:
    data, path = os.urandom((8 << 20) + 3), join(bucket, "tokenizer.json")
    assert store.create(path, data).size == len(data)
    with pytest.raises(LostRace):
        store.create(path, data)
    assert store.read(path) == data


def test_tensorstore_finds_the_emulator_that_only_the_store_was_told_of(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_for(bucket)
    store.create(join(bucket, "run 1/ü"), b"value")
    kvstore = ts.KvStore.open(store.kvstore(join(bucket, "run 1/"))).result()
    assert kvstore["ü"] == b"value"
    monkeypatch.setenv(gs_http.TENSORSTORE, "http://127.0.0.1:1")
    store.kvstore(bucket)
    assert os.environ[gs_http.TENSORSTORE] == "http://127.0.0.1:1"


def test_a_store_that_is_no_emulator_does_not_send_tensorstore_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gs_http.TENSORSTORE, raising=False)
    gs_http.point_tensorstore_at("localhost:4443")
    assert os.environ[gs_http.TENSORSTORE] == "http://localhost:4443"
    gs_http.point_tensorstore_at(None)
    assert gs_http.TENSORSTORE not in os.environ


def test_a_checksum_of_parts_is_the_checksum_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for lengths in ((), (0,), (1, 2, 3), (1000, 0, 7, 8 << 10)):
        parts = [rng.bytes(n) for n in lengths]
        expected = gs_http.checksum(b"".join(parts))
        assert crc32c.whole((gs_http.checksum(part), len(part)) for part in parts) == expected


def test_a_bucket_that_does_not_exist_is_one_sentence(store: GsStore) -> None:
    path = "gs://no-such-bucket-here/x"
    verbs = (
        lambda: store.stat(path),
        lambda: store.listdir(path),
        lambda: list(store.walk(path)),
        lambda: store.read(path),
        lambda: store.read(path, 1, 1),
        lambda: store.create(path, b"{}"),
        lambda: store.delete(path),
        lambda: store.writer(path, 1),
    )
    for verb in verbs:
        with pytest.raises(StorageError, match="bucket 'no-such-bucket-here' does not exist") as refused:
            verb()
        assert isinstance(refused.value, InputError)
        assert len(refused.value.problems) == 1
