"""The sampler's environment, `MTX2VLLM_*`, read once and checked as a whole.

| variable | meaning | default |
|---|---|---|
| WATCH | the root to follow; unset: the plugin does nothing | |
| POLICY | `latest` or `step:N` | latest |
| POLL_SECONDS | how often a root is listed | 1, gs:// 5 |
| CACHE_DIR, CACHE_SIZE | where versions that cannot be mapped are kept, and how much | memory, 32GiB |
| REPLICA | the name of the lease | the host's name |
| METRICS_PORT, METRICS_HOST | where metrics and health are served; port + rank if data-parallel | off, 127.0.0.1 |
| REQUESTS | what a swap does to running requests: preempt, keep, drain | preempt |
| UNREADY | what requests meet before a first version is in: wait, fail | wait |
| SWAP | auto, double, inplace | auto |
| SCREEN | also refuse versions with NaN or infinity: off, nan | off |
"""

import difflib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mtx2vllm.converter.commands.sizes import parse_size
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.storage import GS, normal, store_for
from mtx2vllm.reload.engine import Requests, SwapMode

PREFIX = "MTX2VLLM_"
_UNITS = ((2**40, "TiB"), (10**12, "TB"), (2**30, "GiB"), (10**9, "GB"), (2**20, "MiB"), (10**6, "MB"), (2**10, "KiB"))
_ELSEWHERE = {"traceback"}  # variables of ours that are no settings of the agent


@dataclass(frozen=True, slots=True)
class Policy:
    """Which version a replica wants: the newest (`step` None), or that one."""

    step: int | None = None

    def __str__(self) -> str:
        return "latest" if self.step is None else f"step:{self.step}"


def parse_policy(text: object) -> Policy:
    """`latest` or `step:N`.

    Raises:
        ValueError: neither.
    """
    if isinstance(text, Policy):
        return text
    found = re.fullmatch(r"latest|step:(0|[1-9][0-9]{0,17})", str(text).strip())
    if found is None:
        raise ValueError("is neither `latest` nor `step:N`")
    return Policy(int(found[1]) if found[1] else None)


def _replica(text: object) -> str:
    name = str(text)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", name):
        raise ValueError("may hold letters, digits, '.', '_' and '-' only (it becomes a file's name)")
    return name


def _root(text: object) -> str:
    try:
        store = store_for(str(text))
    except InputError as error:
        raise ValueError(str(error)) from None
    path = store.local(str(text))
    return normal(str(text)) if path is None else str(Path(path).absolute())  # the process may change its directory


def host_name() -> str:
    """This host's name, fit for a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip(".-") or "replica"


class Settings(BaseModel):
    """What an agent is told. `poll_seconds` None means the root's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    watch: Annotated[str, BeforeValidator(_root)]
    policy: Annotated[Policy, BeforeValidator(parse_policy)] = Policy()
    poll_seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    cache_dir: str | None = None
    cache_size: Annotated[int, BeforeValidator(parse_size), Field(gt=0)] = 32 << 30
    replica: Annotated[str, BeforeValidator(_replica)] = Field(default_factory=host_name)
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    metrics_host: str = "127.0.0.1"
    requests: Requests = "preempt"
    unready: Literal["wait", "fail"] = "wait"
    swap: SwapMode = "auto"
    screen: Literal["off", "nan"] = "off"

    @property
    def poll(self) -> float:
        """Seconds between two listings."""
        return self.poll_seconds or (5.0 if self.watch.startswith(GS) else 1.0)

    def shown(self) -> dict[str, str]:
        """What counts, as one would write it into the environment, by the variables' names without the prefix."""
        values = {**self.model_dump(), "policy": self.policy, "poll_seconds": f"{self.poll:g}"}
        values["cache_size"] = _size(self.cache_size)
        return {name.upper(): str(value) for name, value in values.items() if value is not None}


def _size(n: int) -> str:
    return next((f"{n // unit}{name}" for unit, name in _UNITS if n % unit == 0), str(n))


def settings_for(root: str, **values: Any) -> Settings:
    """Settings given in Python, checked as the environment's are.

    Raises:
        InputError: with every problem.
    """
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return Settings(watch=root, **given)
    except ValidationError as error:
        raise InputError([_sentence(e, "") for e in error.errors(include_url=False)]) from None


def read_environment(environ: Mapping[str, str] | None = None) -> Settings | None:
    """The settings that `MTX2VLLM_*` say, None where MTX2VLLM_WATCH is unset or empty.

    Raises:
        InputError: with every problem; a misspelt name is one.
    """
    environ = os.environ if environ is None else environ
    if not environ.get(PREFIX + "WATCH"):
        return None
    given = {key: value for key, value in environ.items() if key.startswith(PREFIX) and value != ""}
    values = {key.removeprefix(PREFIX).lower(): value for key, value in given.items()}
    known = set(Settings.model_fields)
    problems = [_unknown(key, known) for key in given if key.removeprefix(PREFIX).lower() not in known | _ELSEWHERE]
    try:
        settings = Settings.model_validate({key: value for key, value in values.items() if key in known})
    except ValidationError as error:
        problems += [_sentence(e, PREFIX) for e in error.errors(include_url=False)]
    if problems:
        raise InputError(problems)
    return settings


def environment_problems(environ: Mapping[str, str]) -> list[str]:
    """Everything that is wrong with the variables, also where MTX2VLLM_WATCH is not set and nothing reads them."""
    watch = environ.get(PREFIX + "WATCH") or "/"
    try:
        read_environment({**environ, PREFIX + "WATCH": watch})
    except InputError as error:
        return list(error.problems)
    return []


def _unknown(key: str, known: set[str]) -> str:
    hint = _hint(key.removeprefix(PREFIX).upper(), {name.upper() for name in known}, PREFIX)
    return f"{key} is not a variable of mtx2vllm; {hint}"


def _hint(name: str, known: set[str], prefix: str = "") -> str:
    """What may have been meant by an unknown name."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(sorted(known))}."


def _sentence(error: Any, prefix: str) -> str:
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":  # of the environment `_unknown` has told already
        return f"{name} is not a setting of the agent; {_hint(name, Settings.model_fields.keys() - {'watch'})}"
    return f"{(prefix + name.upper()) if prefix else name} = {error['input']!r} {_wrong(error)}."


def _wrong(error: Any) -> str:
    """What is wrong with a value, in our words."""
    limits = error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            return f"is too small; it must be more than {limits['gt']:g}"
        case "greater_than_equal":
            return f"is too small; it must be at least {limits['ge']}"
        case "less_than_equal":
            return f"is too large; it may be at most {limits['le']:g}"
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "is no whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "is no number"
        case "literal_error":
            return f"is not known; it may be {limits['expected'].replace(chr(39), '')}"
        case "string_type":
            return "is no text"
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix(f"{error['input']!r}").lstrip(": ").rstrip(".")
    return text if text.startswith(("is ", "may ")) else f"is wrong: {text}"
