"""`mtx2vllm doctor [ROOT]`: what is set, what the engine offers, and whether a root can be read, written and watched.

Nothing heavy is imported: vLLM is looked at from outside, its version and whether its loader has the native way in.
"""

import contextlib
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtx2vllm.reload import accelerator
from mtx2vllm.reload.doctor_root import Finding, examine_root
from mtx2vllm.reload.settings import PREFIX, environment_problems, read_environment

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
        found += examine_root(root)
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
    if find_spec("vllm") is None:
        found.append(Finding("note", "plugin", "vLLM is not installed here, so nothing loads the plugin"))
    elif plugins:
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
    if problems := environment_problems(environ):
        return [Finding("problem", "environment", problem) for problem in problems]
    settings = read_environment(environ)
    if settings is None:
        return [Finding("note", "environment", f"{PREFIX}WATCH is not set: a sampler started here follows nothing")]
    shown = ", ".join(f"{PREFIX}{name}={value}" for name, value in settings.shown().items())
    found = [Finding("ok", "environment", shown)]
    return found if settings.cache_dir is None else [*found, _cache(settings.cache_dir)]


def _cache(directory: str) -> Finding:
    """Make it as the agent will, write into it, and leave nothing."""
    path = Path(directory).absolute()
    made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]  # innermost first
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"0")
    except OSError as error:
        return Finding(
            "problem",
            "cache",
            f"{PREFIX}CACHE_DIR = {directory} cannot be made or written ({error.strerror}): name a directory on a disk of "
            "this machine, or unset it to stage in memory",
        )
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
    return Finding("ok", "cache", f"{directory} can be written")
