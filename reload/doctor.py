"""`mtx2vllm doctor [ROOT]`: what is set, what the engine offers, and whether a root can be read, written and watched.

Nothing heavy is imported: vLLM is looked at from outside, its version and whether its loader has the native way in.
"""

import contextlib
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtx2vllm.converter.errors import InputError, LostRace
from mtx2vllm.converter.fleet import root as roots
from mtx2vllm.converter.storage import LEFTOVER, Store, join, store_for
from mtx2vllm.reload import accelerator
from mtx2vllm.reload.settings import PREFIX, read_environment

_PACKAGES = (
    "mtx2vllm",
    "vllm-tpu",
    "vllm",
    "tpu-inference",
    "torchax",
    "jax",
    "orbax-checkpoint",
    "tensorstore",
    "ray",
)
_NATIVE = "tpu_inference.models.vllm.vllm_model_wrapper"
_EVENT_WAIT_S = 2.0
_SKEW_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line: `level` is ok, note or problem."""

    level: str
    topic: str
    text: str


@dataclass(frozen=True)
class Examination:
    """All findings; `ok` where none is a problem."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way."""
        return all(f.level != "problem" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """What `doctor --json` prints."""
        return {"ok": self.ok, "findings": [vars(f) for f in self.findings]}

    def text(self) -> str:
        """One line a finding."""
        marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
        return "\n".join(f"{marks[f.level]} {f.topic}: {f.text}" for f in self.findings)


def examine(root: str | None, environ: Mapping[str, str] | None = None) -> Examination:
    """Look at everything; `root` defaults to MTX2VLLM_WATCH."""
    environ = os.environ if environ is None else environ
    found = [*_versions(), *_engine(environ), *_settings(environ)]
    root = root or environ.get(PREFIX + "WATCH") or None
    if root:
        found += _root(root)
    return Examination(found)


def _versions() -> list[Finding]:
    have = []
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            have.append(f"{name} {metadata.version(name)}")
    return [Finding("ok", "packages", f"Python {platform.python_version()}, {', '.join(have)}")]


def _engine(environ: Mapping[str, str]) -> list[Finding]:
    found = []
    plugins = [e.value for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "mtx2vllm"]
    if plugins:
        found.append(Finding("ok", "plugin", f"vLLM will load {plugins[0]}"))
    else:
        found.append(
            Finding("problem", "plugin", "vLLM will not find the plugin; install mtx2vllm where vLLM is installed")
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "mtx2vllm" not in allowed.split(","):
        found.append(
            Finding("problem", "plugin", f"VLLM_PLUGINS={allowed} leaves mtx2vllm out; add it or unset the variable")
        )
    native = _native()
    if native is None:
        found.append(
            Finding("note", "engine", "tpu-inference is not installed here: this machine can convert, not serve")
        )
    elif native:
        found.append(Finding("ok", "engine", "tpu-inference has load_canonical_weights; it will be used"))
    else:
        found.append(
            Finding("ok", "engine", "tpu-inference has no load_canonical_weights; mtx2vllm's own loader will be used")
        )
    return [*found, _accelerator(environ)]


def _accelerator(environ: Mapping[str, str]) -> Finding:
    why = accelerator.missing(environ)
    if why is not None:
        return Finding("note", "accelerator", f"no TPU device is visible here: {why}")
    if chosen := environ.get("JAX_PLATFORMS"):
        return Finding("ok", "accelerator", f"JAX_PLATFORMS={chosen}")
    return Finding("ok", "accelerator", ", ".join(accelerator.devices()))


def _native() -> bool | None:
    """Whether the installed tpu-inference has the native loader; None where it is not installed. Its source is searched
    rather than imported: importing takes half a minute."""
    try:
        package = find_spec("tpu_inference")
    except (ImportError, ValueError):
        return None
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0], *_NATIVE.split(".")[1:]).with_suffix(".py")
    try:
        return "def load_canonical_weights" in path.read_text(encoding="utf-8")
    except OSError:
        return None


def _settings(environ: Mapping[str, str]) -> list[Finding]:
    try:
        settings = read_environment(environ)
    except InputError as error:
        return [Finding("problem", "environment", problem) for problem in error.problems]
    if settings is None:
        return [Finding("note", "environment", f"{PREFIX}WATCH is not set: a sampler started here follows nothing")]
    shown = ", ".join(f"{name}={value}" for name, value in settings.model_dump().items() if value is not None)
    return [Finding("ok", "environment", shown)]


def _root(root: str) -> list[Finding]:
    store = store_for(root)
    try:
        entries = store.listdir(root)
    except (InputError, OSError) as error:
        return [Finding("problem", "root", f"{root} cannot be read: {error}")]
    local = store.local(root)
    if local is not None and not Path(local).is_dir():
        return [Finding("note", "root", f"{root} does not exist yet; agents wait for it, follow creates it")]
    committed = [s for s in roots.steps_in(entries) if store.stat(roots.manifest_path(root, s))]
    newest = f"{len(committed)} versions, newest {committed[0]}" if committed else "no committed version yet"
    found = [Finding("ok" if entries else "note", "root", f"{root} can be read: {newest}")]
    found += _writing(store, root)
    if store.local(root) is not None:
        found.append(_events(root))
    else:
        found.append(Finding("ok", "events", "an object store raises none; it is listed at every poll"))
    return found + _fleet(root)


def _writing(store: Store, root: str) -> list[Finding]:
    """Write a small file, compare the store's clock with ours, take it away."""
    probe = join(root, f"{LEFTOVER}doctor-{secrets.token_hex(4)}")
    try:
        before = time.time()
        stat = store.create(probe, b"{}")
        after = time.time()
        store.delete(probe)
    except (InputError, OSError) as error:
        return [
            Finding(
                "note",
                "writing",
                f"{root} cannot be written ({error}): agents work, but their leases protect nothing from prune",
            )
        ]
    skew = stat.modified - (before + after) / 2
    text = f"the store's clock differs from this machine's by {_tenths(skew):+.1f} s"
    level = "ok" if abs(skew) < _SKEW_S + (after - before) else "problem"
    hint = "" if level == "ok" else "; leases are told alive or dead by it: set the clocks (NTP)"
    return [Finding("ok", "writing", f"{root} can be written"), Finding(level, "clock", text + hint)]


def _tenths(seconds: float) -> float:
    return round(seconds, 1) + 0.0  # no -0.0


def _events(root: str) -> Finding:
    from watchdog.events import FileSystemEvent, FileSystemEventHandler

    from mtx2vllm.reload.watch import inotify_observer

    seen = threading.Event()

    class Handler(FileSystemEventHandler):
        """Any event will do."""

        def on_any_event(self, event: FileSystemEvent) -> None:
            if LEFTOVER in str(event.src_path):
                seen.set()

    observer = inotify_observer()
    try:
        observer.schedule(Handler(), root, recursive=False)
        observer.start()
    except OSError as error:
        return Finding(
            "note",
            "events",
            f"inotify refused ({error.strerror}); {root} will be polled. Raise fs.inotify limits to change that",
        )
    try:
        _poke(root)
        raised = seen.wait(_EVENT_WAIT_S)
    finally:
        observer.stop()
        observer.join()
    if raised:
        return Finding("ok", "events", f"{root} raises events for changes made on this machine")
    return Finding(
        "note", "events", f"{root} raised no event (a network or FUSE mount, or read-only); it is polled instead"
    )


def _poke(root: str, store: Callable[[str], Store] = store_for) -> None:
    with contextlib.suppress(OSError, InputError, LostRace):
        path = join(root, f"{LEFTOVER}doctor-{secrets.token_hex(4)}")
        store(root).create(path, b"{}")
        store(root).delete(path)


def _replica(seen: roots.Seen[roots.Lease]) -> Finding:
    lease, expired = seen.lease, "" if seen.alive else " (expired)"
    text = f"{lease.replica} serves {lease.loaded}, {lease.state}, seen {seen.age:.0f} s ago{expired}"
    level = "ok" if seen.alive and not lease.error else "note"
    return Finding(level, "replica", text + (f": {lease.error}" if lease.error else ""))


def _fleet(root: str) -> list[Finding]:
    now = time.time()
    found = []
    follower = roots.read_follower(root, now)
    if follower is None:
        found.append(Finding("note", "follower", "none has written here"))
    else:
        lease = follower.lease
        text = f"{lease.holder} lives" if follower.alive else f"{lease.holder} is dead for {follower.age:.0f} s"
        if lease.ttl_s <= 0:  # given back
            text = "none is running (the last one stopped cleanly)"
        alive = follower.alive and lease.ttl_s > 0
        found.append(Finding("ok" if alive else "note", "follower", text))
    found += [_replica(seen) for seen in roots.read_agents(root, now)]
    pin = roots.read_pin(root)
    return (
        found
        if pin is None
        else [*found, Finding("note", "pin", f"the whole fleet is held at step {pin}; mtx2vllm unpin {root}")]
    )
