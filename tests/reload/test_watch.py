"""Watching, with the real inotify where it is about events, and with observers that fail or never speak elsewhere."""

import errno
import logging
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine, until
from versions import arrays, write_version
from watchdog.observers.api import EventQueue, ObservedWatch

from mtx2vllm.converter.storage import store_for
from mtx2vllm.reload import watch
from mtx2vllm.reload.watch import ListingEmitter, RootSnapshot, Watcher, inotify_observer, is_silent

A, B = arrays(1), arrays(2)
NEVER = 3600.0  # a poll that cannot be what found it


class Wakes:
    """Counts how often the loop was woken."""

    def __init__(self) -> None:
        self.count = 0
        self.event = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.event.set()

    def settle(self) -> int:
        """The count once nothing more comes."""
        while self.event.wait(1.0):
            self.event.clear()
        return self.count


@pytest.fixture
def watching(tmp_path: Path):
    made: list[Watcher] = []

    def make(root: Path, **options) -> tuple[Watcher, Wakes]:
        wakes = Wakes()
        watcher = Watcher(str(root), options.pop("poll", NEVER), wakes, **options)
        made.append(watcher)
        watcher.start()
        return watcher, wakes

    yield make
    for watcher in made:
        watcher.stop()


def test_events_wake_within_the_root_and_within_versions_being_written(tmp_path: Path, watching) -> None:
    watcher, wakes = watching(tmp_path)
    assert watcher.kind == "inotify" and watcher.attend() and not watcher.attend()
    (tmp_path / "5").mkdir()
    assert wakes.event.wait(5)
    assert watcher.attend([5])  # look again: the manifest may have come before the watch
    wakes.settle()
    before = wakes.count
    (tmp_path / "5" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "5" / "mtx2vllm.json").write_text("{}")
    until(lambda: wakes.count > before)


def test_an_emitter_that_is_stopped_while_it_works_says_nothing(tmp_path: Path, caplog) -> None:
    from watchdog.observers.inotify import InotifyEmitter

    assert inotify_observer().emitters == set()
    stopped = InotifyEmitter(EventQueue(), ObservedWatch(str(tmp_path), recursive=False))
    stopped.queue_events(1.0)  # what its thread does when it is stopped between its question and this call
    logging.getLogger("watchdog.observers.inotify").error("anything else")
    assert caplog.messages == ["anything else"]


def test_our_own_reading_and_leases_do_not_wake(tmp_path: Path, watching) -> None:
    write_version(tmp_path / "5", A, commit=False)
    (tmp_path / ".agents").mkdir()
    watcher, wakes = watching(tmp_path)
    watcher.attend([5])
    wakes.settle()
    wakes.count = 0
    store = store_for(str(tmp_path))
    for _ in range(3):
        RootSnapshot(str(tmp_path))()
        [store.read(str(path)) for path in tmp_path.rglob("*") if path.is_file()]
        store.replace(str(tmp_path / ".agents" / "r.json"), b"{}")
    assert wakes.settle() == 0


def test_a_version_moved_in_from_outside_is_seen_by_the_event_alone(tmp_path: Path, make_agent) -> None:
    engine, root = FakeEngine(A), tmp_path / "root"
    root.mkdir()
    agent = make_agent(engine, poll_seconds=NEVER).start()
    until((root / ".agents" / "r0.json").exists)
    time.sleep(0.3)
    write_version(tmp_path / "7", A).rename(root / "7")
    until(lambda: agent.status().loaded == 7)
    assert agent.status().watching == "inotify"


def test_a_version_written_in_place_is_seen_by_events_alone(tmp_path: Path, make_agent) -> None:
    engine, root = FakeEngine(A), tmp_path / "root"
    root.mkdir()
    agent = make_agent(engine, poll_seconds=NEVER).start()
    until((root / ".agents" / "r0.json").exists)
    time.sleep(0.3)
    for step, tensors in ((7, A), (8, B)):
        write_version(root / str(step), tensors)
        until(lambda step=step: agent.status().loaded == step)
    (root / ".pin.json").write_text('{"step": 7}')
    until(lambda: agent.status().loaded == 7)


class Silent:
    """An observer as on NFS: takes every watch and never says anything."""

    def __init__(self) -> None:
        self.watched: list[str] = []

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def schedule(self, handler, path: str, *, recursive: bool = False):
        assert not recursive
        self.watched.append(path)
        return path

    def unschedule(self, watch) -> None:
        self.watched.remove(watch)


def test_the_slow_poll_finds_what_no_event_tells(tmp_path: Path, make_agent, monkeypatch) -> None:
    engine, root = FakeEngine(A), tmp_path / "root"
    root.mkdir()
    agent = make_agent(engine, poll_seconds=0.2)
    agent._watcher._make = Silent
    agent.start()
    for step, tensors in ((7, A), (8, B)):
        write_version(root / str(step), tensors)
        until(lambda step=step: agent.status().loaded == step)


class Limited(Silent):
    """inotify's limits are reached: at the observer's start, or with a watch."""

    number = errno.ENOSPC
    at_start = False
    spare = 0

    def start(self) -> None:
        if self.at_start:
            raise OSError(self.number, "limit")

    def schedule(self, handler, path: str, *, recursive: bool = False):
        if len(self.watched) >= self.spare:
            raise OSError(self.number, "inotify watch limit reached")
        return super().schedule(handler, path, recursive=recursive)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize(("at_start", "spare"), [(True, 0), (False, 0), (False, 1)])
def test_inotify_limits(tmp_path: Path, make_agent, caplog, number: int, at_start: bool, spare: int) -> None:
    engine, root = FakeEngine(A), tmp_path / "root"
    root.mkdir()
    agent = make_agent(engine, poll_seconds=0.1)
    kind = type("Case", (Limited,), {"number": number, "at_start": at_start, "spare": spare})
    agent._watcher._make = kind
    agent.start()
    write_version(root / "6", B, commit=False)  # one more watch
    until(lambda: agent.status().watching == "listing")
    write_version(root / "7", A)
    until(lambda: agent.status().loaded == 7)
    said = [record for record in caplog.records if "cannot be watched by inotify" in record.message]
    assert len(said) == 1 and "max_user_watches" in said[0].message
    assert b'watch_fallbacks_total{reason="inotify_limit"} 1.0' in agent.metrics.page().body


def test_the_real_limit_falls_back_too(tmp_path: Path, make_agent, monkeypatch) -> None:
    """What watchdog raises by itself when the kernel refuses."""
    from watchdog.observers import inotify_c

    def refuse(*args: object) -> int:
        inotify_c.ctypes.set_errno(errno.EMFILE)
        return -1

    monkeypatch.setattr(inotify_c, "inotify_init", refuse)
    monkeypatch.setattr(inotify_c, "inotify_add_watch", refuse)
    engine, root = FakeEngine(A), tmp_path / "root"
    write_version(root / "7", A)
    agent = make_agent(engine).start()
    until(lambda: agent.status().watching == "listing" and agent.status().loaded == 7)


def test_the_number_of_watches_does_not_grow_with_the_versions(tmp_path: Path, watching) -> None:
    """Ten thousand files in a hundred directories, half of them not committed: five watches, one listing a look."""
    for step in range(100):
        (tmp_path / str(step)).mkdir()
        for file in range(100):
            (tmp_path / str(step) / f"{file}").touch()
    observer = Silent()
    watcher, _ = watching(tmp_path, observer=lambda: observer)
    watcher.attend(range(100))
    assert sorted(Path(path).name for path in observer.watched) == sorted([tmp_path.name, "96", "97", "98", "99"])
    watcher.attend([3])
    assert {Path(path).name for path in observer.watched} == {tmp_path.name, "3"}
    watcher.attend()
    assert len(observer.watched) == 1


def test_a_look_lists_the_root_once_and_no_version(tmp_path: Path, monkeypatch) -> None:
    for step in range(50):
        write_version(tmp_path / str(step), {"model.norm.weight": A["model.norm.weight"]}, shards=1)
    (tmp_path / ".pin.json").write_text('{"step": 3}')
    for step in (60, 61, 62):
        (tmp_path / str(step)).mkdir()
    store, calls = store_for(str(tmp_path)), []
    for verb in ("listdir", "stat", "read", "walk"):
        real = getattr(store, verb)
        monkeypatch.setattr(store, verb, lambda *a, real=real, verb=verb: (calls.append(verb), real(*a))[1])
    RootSnapshot(str(tmp_path))()
    assert calls.count("listdir") == 1 and calls.count("stat") <= 5 and len(calls) <= 6


@pytest.mark.parametrize("path", ["through a link", "renamed away and made anew"])
def test_the_watch_follows_the_name(tmp_path: Path, watching, path: str) -> None:
    root = tmp_path / "root"
    (tmp_path / "a").mkdir()
    root.symlink_to(tmp_path / "a") if path == "through a link" else root.mkdir()
    watcher, wakes = watching(root)
    assert watcher.attend()
    if path == "through a link":
        (tmp_path / "b").mkdir()
        root.unlink()
        root.symlink_to(tmp_path / "b")
    else:
        root.rename(tmp_path / "old")
        assert not watcher.attend()
        root.mkdir()
    assert watcher.attend()
    wakes.settle()
    before = wakes.count
    (root / "5").mkdir()
    until(lambda: wakes.count > before)


def emitter(snapshot, poll: float = 0.001) -> tuple[ListingEmitter, EventQueue]:
    queue = EventQueue()
    return ListingEmitter(queue, ObservedWatch("gs://b/r", recursive=False), snapshot=snapshot, poll=poll), queue


def test_the_emitter_speaks_when_something_changed() -> None:
    facts = iter([1, 1, 2, 2, 2])
    found, queue = emitter(lambda: next(facts))
    counts = []
    for _ in range(5):
        found.queue_events(1.0)
        counts.append(queue.qsize())
        while queue.qsize():
            queue.get()
    assert counts == [1, 0, 1, 0, 0]


def test_the_emitter_backs_off_and_comes_back(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    answers: list[object] = [1, OSError("down"), OSError("down"), ValueError("odd"), 1]

    def snapshot() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found, queue = emitter(snapshot)
    random.seed(1)
    delays = []
    for _ in range(5):
        found.queue_events(1.0)
        delays.append(found.delay() / 0.001)
    expected = [1, 2, 4, 8, 1]
    assert all(0.8 * e <= d <= e for d, e in zip(delays, expected, strict=True))
    assert queue.qsize() == 1 or queue.qsize() == 2  # the first look, and the store's return (repeats are merged)
    found._failures, found._poll = 10, 5.0
    assert 48 <= found.delay() <= 60


def test_jitter_spreads_a_fleet() -> None:
    delays = {round(emitter(lambda: 0, 5.0)[0].delay(), 3) for _ in range(64)}
    assert len(delays) > 30 and min(delays) >= 4.0 and max(delays) <= 5.0


def test_a_listing_observer_end_to_end(tmp_path: Path, watching, monkeypatch) -> None:
    """The emitter under watchdog's own observer: what a gs:// root and a silent mount get."""
    monkeypatch.setattr(watch, "is_silent", lambda path: True)
    root = tmp_path / "root"
    root.mkdir()
    watcher, wakes = watching(root, poll=0.05)
    assert watcher.kind == "listing" and watcher.interval == pytest.approx(0.5) and not watcher.attend([1])
    for change in (
        (root / "5").mkdir,
        lambda: (root / "5" / "mtx2vllm.json").write_text("{}"),
        lambda: (root / ".pin.json").write_text('{"step": 5}'),
        lambda: (root / ".pin.json").write_text('{"step": 6}'),
        lambda: shutil.rmtree(root),
        root.mkdir,
    ):
        time.sleep(0.15)
        before = wakes.count
        change()
        if change is not None and root.exists() and list(root.iterdir()):
            until(lambda before=before: wakes.count > before)


MOUNTS = """\
rootfs / ext4 rw 0 0
server:/x /mnt/nfs nfs4 rw 0 0
gcsfuse /mnt/bucket fuse.gcsfuse rw 0 0
tmpfs /mnt/nfs/local tmpfs rw 0 0
//pc/share /mnt/with\\040space cifs rw 0 0
host /mnt/host 9p rw 0 0
broken
"""


@pytest.mark.parametrize(
    ("path", "silent"),
    [
        ("/home/x", False), ("/mnt/nfs/run", True), ("/mnt/nfs", True), ("/mnt/nfsx", False), ("/mnt/bucket/a/b", True),
        ("/mnt/nfs/local/x", False), ("/mnt/with space/r", True), ("/mnt/host/r", True),
    ],
)  # fmt: skip
def test_mounts_without_events(path: str, silent: bool) -> None:
    assert is_silent(path, MOUNTS) is silent
