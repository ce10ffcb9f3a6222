"""Every verb of the store through every fault: what may pass is retried to the same bits, what will not is one
sentence."""

import os
import socket
from collections.abc import Callable

import pytest
import tensorstore as ts

from gcs import proxy
from gcs.emulator import free_port
from gcs.test_store import write
from mtx2vllm.converter.errors import LostRace, StorageError, StoreUnavailable
from mtx2vllm.converter.storage import gs_upload, join, store_for
from mtx2vllm.converter.storage.gs import GsStore
from mtx2vllm.converter.storage.gs_http import Connection
from mtx2vllm.converter.storage.retry import Policy, Transient, retrying

DATA = os.urandom(300_000)
BIG = os.urandom((8 << 20) + 1)


def _stat(store: GsStore, at: str) -> None:
    assert store.stat(join(at, "d/f")).size == len(DATA)


def _listdir(store: GsStore, at: str) -> None:
    assert [(e.name, e.size) for e in store.listdir(join(at, "d"))] == [("f", len(DATA))]


def _walk(store: GsStore, at: str) -> None:
    assert list(store.walk(at)) == ["d/f"]


def _read(store: GsStore, at: str) -> None:
    assert store.read(join(at, "d/f")) == DATA


def _read_range(store: GsStore, at: str) -> None:
    out = bytearray(200_000)
    store.read_into(join(at, "d/f"), 50_000, memoryview(out))
    assert out == DATA[50_000:250_000]


def _create(store: GsStore, at: str) -> None:
    stat = store.create(join(at, "new"), DATA)
    assert (store.stat(join(at, "new")), store.read(join(at, "new"))) == (stat, DATA)


def _replace(store: GsStore, at: str) -> None:
    path = join(at, "d/f")
    stat = store.replace(path, b"other", store.stat(path).generation)
    assert (store.stat(path), store.read(path)) == (stat, b"other")


def _create_big(store: GsStore, at: str) -> None:
    store.create(join(at, "big"), BIG)
    assert store.read(join(at, "big")) == BIG


def _write(store: GsStore, at: str) -> None:
    write(store, join(at, "w/shard"), DATA, 1000)
    assert store.read(join(at, "w/shard")) == DATA
    assert list(store.walk(join(at, "w"))) == ["shard"]


def _delete(store: GsStore, at: str) -> None:
    store.delete(join(at, "d/f"))
    assert store.stat(join(at, "d/f")) is None


def _delete_all(store: GsStore, at: str) -> None:
    assert store.delete_all(join(at, "d")) in {0, 1}  # 0: the answer to a deletion was lost
    assert store.listdir(at) == []


VERBS = [
    (_stat, "GET"), (_listdir, "GET"), (_walk, "GET"), (_read, "GET"), (_read_range, "GET"),
    (_create, "POST"), (_create, "GET"), (_replace, "POST"), (_replace, "GET"),
    (_create_big, "POST"), (_create_big, "PUT"), (_write, "POST"), (_write, "GET"), (_write, "DELETE"),
    (_delete, "DELETE"), (_delete_all, "DELETE"), (_delete_all, "GET"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs_upload, "PART", 8000)
    monkeypatch.setattr(gs_upload, "PENDING", 30_000)


@pytest.mark.parametrize("fault", [kind for kind in proxy.TRANSIENT if kind != "wrong"])
@pytest.mark.parametrize(("verb", "method"), VERBS, ids=lambda value: getattr(value, "__name__", value).strip("_"))
def test_a_verb_survives_a_fault(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str,
    verb: Callable[[GsStore, str], None], method: str, fault: str,
) -> None:  # fmt: skip
    store.create(join(bucket, "d/f"), DATA)
    broken.first(2, fault, method)
    verb(faulty, bucket)
    assert broken.faults[fault, method] == min(2, broken.requests[method])
    assert broken.faults[fault, method] > 0


@pytest.mark.parametrize(
    ("verb", "method"), [(_read, "GET"), (_create, "POST"), (_create_big, "PUT"), (_write, "POST"), (_replace, "POST")]
)
def test_wrong_bytes_are_seen_and_sent_again(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str, verb: Callable[[GsStore, str], None], method: str
) -> None:
    store.create(join(bucket, "d/f"), DATA)
    broken.first(2, "wrong", method, content=True)
    verb(faulty, bucket)
    assert broken.faults["wrong", method] == 2


def test_a_transfer_that_breaks_goes_on_where_it_broke(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str
) -> None:
    store.create(join(bucket, "d/f"), DATA)
    spans: list[str] = []

    def choose(request: proxy.Request) -> str | None:
        spans.append(request.span)
        return "truncate" if len(spans) == 1 else None

    broken.choose = choose
    _read_range(faulty, bucket)
    assert spans == ["bytes=50000-249999", "bytes=150000-249999"]


def test_an_object_that_is_replaced_in_mid_transfer_is_read_from_its_start(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str
) -> None:
    path, seen = join(bucket, "f"), 0
    store.create(path, b"a" * 1000)

    def choose(request: proxy.Request) -> str | None:
        nonlocal seen
        seen += 1
        if seen == 2:
            store.replace(path, b"b" * 1000)
        return "reset" if seen == 1 else None

    broken.choose = choose
    out = bytearray(1000)
    faulty.read_into(path, 0, memoryview(out))
    assert out == b"b" * 1000


def test_a_lost_answer_does_not_make_us_lose_against_ourselves(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str
) -> None:
    broken.first(1, "lost", "POST")
    _create(faulty, bucket)
    broken.first(1, "lost", "POST", "compose")
    write(faulty, join(bucket, "shard"), DATA, 100_000)
    broken.first(1, "lost", "POST")
    store.create(join(bucket, "theirs"), b"same")
    with pytest.raises(LostRace):
        faulty.create(join(bucket, "theirs"), b"same")
    assert broken.faults["lost", "POST"] == 3


def test_wrong_bytes_and_a_lost_answer_together(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str
) -> None:
    class Both(str):
        """Equal to either fault, so that the proxy does both."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return other in {"wrong", "lost"}

    broken.first(1, Both("wrong"), "POST")
    _create(faulty, bucket)


@pytest.mark.parametrize(("verb", "method"), VERBS, ids=lambda value: getattr(value, "__name__", value).strip("_"))
def test_a_refusal_is_one_sentence_at_once(
    faulty: GsStore, store: GsStore, broken: proxy.Proxy, bucket: str, verb: Callable[[GsStore, str], None], method: str
) -> None:
    store.create(join(bucket, "d/f"), DATA)
    broken.first(10_000, "403", method)
    if (verb, method) == (_write, "DELETE"):  # only parts are deleted, and they are nobody's concern
        write(faulty, join(bucket, "w/shard"), DATA, 1000)
        assert store.read(join(bucket, "w/shard")) == DATA
        assert store.clean_leftovers(join(bucket, "w")) > 0
        assert list(store.walk(join(bucket, "w"))) == ["shard"]
        return
    with pytest.raises(StorageError, match=r"permission denied \(403.*Grant roles/storage.objectUser") as refused:
        verb(faulty, bucket)
    assert len(refused.value.problems) == 1
    assert not isinstance(refused.value, StoreUnavailable)
    assert store.read(join(bucket, "d/f")) == DATA
    broken.choose = lambda _: None
    assert [name for name in store.walk(bucket) if "parts" in name] == []


def test_a_store_that_never_answers_well_ends_at_the_deadline(broken: proxy.Proxy, bucket: str) -> None:
    hasty = GsStore(broken.url, Policy(first=0.01, longest=0.05, deadline=0.3))
    broken.first(10_000, "503")
    with pytest.raises(StoreUnavailable, match=r"no good answer in \d+ attempts .*status 503") as ended:
        hasty.read(join(bucket, "x"))
    assert ended.value.exit_status == 3
    assert 3 < broken.faults["503", "GET"] < 40


def test_a_server_that_is_not_there_ends_at_the_deadline() -> None:
    with pytest.raises(StoreUnavailable, match="refused"):
        GsStore("http://127.0.0.1:1", Policy(first=0.01, longest=0.02, deadline=0.1)).listdir("gs://b/x")


def test_the_back_off_doubles_with_jitter_up_to_the_deadline() -> None:
    now, pauses = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    def fail() -> None:
        raise Transient("no")

    policy = Policy(1.0, 8.0, 30.0, clock=lambda: now, sleep=sleep, chance=lambda: 0.5)
    with pytest.raises(StoreUnavailable, match="8 attempts over 29 s"):
        retrying(fail, "gs://b/x", policy)
    assert pauses == [0.75, 1.5, 3.0, 6.0, 6.0, 6.0, 6.0]


@pytest.mark.parametrize("fault", ["429", "503", "refuse", "reset", "truncate", "lost", "slow"])
def test_tensorstore_survives_the_same_faults(store: GsStore, broken: proxy.Proxy, bucket: str, fault: str) -> None:
    store.create(join(bucket, "d/f"), DATA)
    spec = store_for(bucket).kvstore(join(bucket, "d"))
    context = ts.Context({"gcs_request_retries": {"initial_delay": "1ms", "max_delay": "10ms"}})
    kvstore = ts.KvStore.open(spec, context=context).result()
    broken.first(2, fault, "GET")
    assert kvstore.read("f", byte_range=slice(1000, 200_000)).result(timeout=30).value == DATA[1000:200_000]
    assert broken.faults[fault, "GET"] >= (1 if fault == "slow" else 2)


def test_a_store_that_was_never_reached_is_given_up_soon_and_in_one_short_sentence() -> None:
    at = [0.0]
    policy = Policy(clock=lambda: at[0], sleep=lambda s: at.__setitem__(0, at[0] + s), chance=lambda: 1.0)
    nobody = GsStore(f"http://127.0.0.1:{free_port()}", policy)
    verbs: list[Callable[[], object]] = [
        lambda: nobody.listdir("gs://b/d"),
        lambda: nobody.stat("gs://b/d/f"),
        lambda: nobody.read("gs://b/d/f"),
        lambda: nobody.read("gs://b/d/f", 1, 2),
    ]
    for verb in verbs:
        begun = at[0]
        with pytest.raises(StoreUnavailable, match=r"cannot be reached .*refused.*check the network") as ended:
            verb()
        assert 5 < at[0] - begun <= policy.contact
        assert len(str(ended.value)) < 300 and "http" not in str(ended.value).lower().replace("httpconnection", "")


def test_a_store_that_answered_once_is_waited_for(caplog: pytest.LogCaptureFixture, bucket: str, server: str) -> None:
    at = [0.0]
    policy = Policy(clock=lambda: at[0], sleep=lambda s: at.__setitem__(0, at[0] + s), chance=lambda: 1.0)
    store = GsStore(server, policy)
    assert store.listdir(bucket) == []
    store._made = Connection(f"http://127.0.0.1:{free_port()}")  # the same store, gone since
    with pytest.raises(StoreUnavailable, match="no good answer in"):
        store.listdir(bucket)
    assert policy.deadline - policy.longest <= at[0] <= policy.deadline
    assert caplog.messages and all(len(said) < 250 and "?" not in said for said in caplog.messages)


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    store = GsStore("http://store.invalid", Policy(first=0.001, longest=0.001, contact=0.01))
    with pytest.raises(StoreUnavailable, match=r"cannot be reached \(NameResolutionError: Failed to resolve"):
        store.stat("gs://b/d")
    with pytest.raises(StoreUnavailable, match=r"cannot be reached \(NameResolutionError: Failed to resolve"):
        store.read("gs://b/d")
