"""What a user chooses for a conversion, from the command line, a batch file or Python."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mtx2vllm.converter.commands.sizes import parse_size
from mtx2vllm.converter.errors import UsageError

Location = str | os.PathLike[str]  # a local path or gs://bucket/key; remote ones are strings
_PLACES = ("hf_config", "base")
_SIZES = ("max_shard_size", "memory_budget")


@dataclass(frozen=True)
class Options:
    """What a user chooses; the command line's options with underscores.

    Attributes:
        hf_config: config.json, a directory with one, or a Hub id. Default: looked for at the checkpoint.
        base: a Hugging Face directory whose other weights (vision tower, ...) are copied; hf layout only.
        layout: `canonical` (for the reload agent) or `hf` (for everything else).
        step: default: the newest committed one.
        dtype: of the weights written: `bfloat16`, `float32` or `source`.
        rope: rotary convention of a Llama checkpoint, `interleaved` or `half`. Default: by the config's rope type.
        text_only: leave vision weights of the checkpoint out.
        allow_uncommitted: accept a step without its commit marker.
        max_shard_size: in bytes, or a text like "4GiB", which becomes bytes.
        memory_budget: what is in flight; as `max_shard_size`.
        workers: threads. Default: one a core.
        executor: `local` or `ray`.
        ray_address: of a Ray cluster.
        overwrite: replace a finished version.
        strict: fail where weights hold NaN or infinity.
    """

    hf_config: str | None = None
    base: str | None = None
    layout: str = "canonical"
    step: int | None = None
    dtype: str = "bfloat16"
    rope: str | None = None
    text_only: bool = False
    allow_uncommitted: bool = False
    max_shard_size: int = 4 << 30
    memory_budget: int = 1 << 30
    workers: int | None = None
    executor: str = "local"
    ray_address: str | None = None
    overwrite: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for key in _PLACES:
            if isinstance(value := getattr(self, key), os.PathLike):
                object.__setattr__(self, key, os.fspath(value))
        for key in _SIZES:
            if isinstance(value := getattr(self, key), str):
                with contextlib.suppress(ValueError):  # `prepare` refuses it, with whatever else is wrong
                    object.__setattr__(self, key, parse_size(value))


def options_of(chosen: Mapping[str, Any]) -> Options:
    """Options by their names.

    Raises:
        UsageError: a name that is none of them.
    """
    known = [field.name for field in fields(Options)]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        named = "there are no options" if len(unknown) > 1 else "there is no option"
        raise UsageError(f"{named} {', '.join(unknown)}; the options are {', '.join(known)}")
    return Options(**chosen)


_CHOICES = {
    "layout": ("canonical", "hf"),
    "dtype": ("bfloat16", "float32", "source"),
    "rope": (None, "interleaved", "half"),
    "executor": ("local", "ray"),
}
_COUNTS = {"step": 0, "max_shard_size": 1, "memory_budget": 1, "workers": 1}  # and the least that each may be


def refuse_misuse(options: Options) -> None:
    """Everything that is wrong with options by themselves.

    Raises:
        UsageError: names all of it.
    """
    problems = [
        f"{key} {value!r} is none of {', '.join(str(c) for c in choices if c)}"
        for key, choices in _CHOICES.items()
        if (value := getattr(options, key)) not in choices
    ]
    for key in _PLACES:
        if not isinstance(value := getattr(options, key), str | None):
            problems.append(f"{key} {value!r} is no path; give a string or a pathlib.Path")
    for key, least in _COUNTS.items():
        value = getattr(options, key)
        if key in _SIZES and isinstance(value, str):
            problems.append(f"{key} {value!r} is not a size; give a number of bytes, or a text like 4GiB or 500MB")
        elif value is not None and (type(value) is not int or value < least):
            problems.append(f"{key} {value!r} is no whole number of at least {least}")
    if options.base and options.layout != "hf":
        problems.append("--base belongs to --layout hf: a canonical version holds the text model only")
    if options.text_only and options.base:
        problems.append("--base wants the vision tower kept and --text-only wants it left out; choose one")
    if options.ray_address and options.executor != "ray":
        problems.append("--ray-address belongs to --executor ray")
    if problems:
        raise UsageError("\n".join(problems))
