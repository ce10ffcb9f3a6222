"""JOBS.yaml: what a batch converts. Read with line numbers, so that every problem says where.

    defaults:                       # any of the settings below, for all jobs
      layout: hf
      hf_config: configs/qwen3
    jobs:
      - checkpoint: runs/a          # a run, checkpoints/, a step, or items/; local or gs://
        step: 300                   # or newest (the default)
        out: exports/a-300
      - checkpoint: gs://bucket/run-b
        steps: [100, 200]           # or all
        layout: [hf, canonical]
        out: exports/b/{step}-{layout}

Relative paths count from the file's own directory. Settings are `convert`'s options with underscores.
"""

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mtx2vllm.converter.commands.sizes import parse_size
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.job import Options
from mtx2vllm.converter.storage import join, parent, store_for

Layout = Literal["canonical", "hf"]
_Size = Annotated[int, BeforeValidator(parse_size)]
_Step = Annotated[int, Field(ge=0)]
_CHOICES = {  # fields that take more than one kind of value
    "layout": "canonical, hf, or a list of these",
    "step": "a step's number or newest",
    "steps": "a list of steps' numbers, or all,",
}


class Settings(BaseModel):
    """`convert`'s options. Each stands in `defaults` or in a job; a job's own word counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hf_config: str | None = None
    base: str | None = None
    layout: Layout | Annotated[list[Layout], Field(min_length=1)] = "canonical"
    dtype: Literal["bfloat16", "float32", "source"] = "bfloat16"
    rope: Literal["interleaved", "half"] | None = None
    text_only: bool = False
    allow_uncommitted: bool = False
    max_shard_size: _Size = 4 << 30
    memory_budget: _Size = 1 << 30
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    overwrite: bool = False
    strict: bool = False


class JobEntry(Settings):
    """One entry of `jobs`: one conversion for each of its steps and layouts."""

    checkpoint: Annotated[str, Field(min_length=1)]
    out: Annotated[str, Field(min_length=1)]
    step: _Step | Literal["newest"] | None = None
    steps: Annotated[list[_Step], Field(min_length=1)] | Literal["all"] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "JobEntry":
        if self.step is not None and self.steps is not None:
            raise ValueError("step and steps cannot both be given")
        unknown = sorted(set(re.findall(r"{(.*?)}", self.out)) - {"step", "layout"})
        if unknown:
            raise ValueError(f"out holds {{{unknown[0]}}}; only {{step}} and {{layout}} are filled in")
        return self


class BatchFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    defaults: Settings = Settings()
    jobs: Annotated[list[JobEntry], Field(min_length=1)]


@dataclass(frozen=True)
class Wanted:
    """A job of the file, as it is meant: settings merged, paths whole, steps and layouts not yet spread."""

    line: int
    checkpoint: str
    out: str
    steps: Sequence[int] | Literal["all", "newest"]
    layouts: Sequence[Layout]
    settings: Mapping[str, Any]

    def options(self, step: int | None, layout: str) -> Options:
        """For one conversion."""
        return Options(step=step, layout=layout, **self.settings)

    def out_of(self, step: int | None, layout: str) -> str:
        """Where one conversion goes."""
        return self.out.replace("{step}", str(step)).replace("{layout}", layout)


def read_jobs(path: str) -> list[Wanted]:
    """Read and check the file.

    Raises:
        InputError: it is missing, no YAML, or says something that cannot be meant; every problem with its line.
    """
    store = store_for(path)
    try:
        text = store.read(path).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the YAML file that lists the conversions") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); it must be a YAML file") from None
    try:
        tree, data = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InputError(
            f"{path}:1: a mapping with `jobs` was expected (and `defaults`, where jobs have much in common)"
        )
    problems = [f"{path}:{line}: {name!r} stands twice" for line, name in _doubled(tree, set())]
    try:
        found = BatchFile.model_validate(data)
    except ValidationError as error:
        problems += [f"{path}:{_line(tree, e['loc'])}: {_sentence(e, data)}" for e in error.errors(include_url=False)]
        raise InputError(list(dict.fromkeys(problems))) from None
    if problems:
        raise InputError(problems)
    home = parent(path)
    return [_wanted(found.defaults, entry, home, _line(tree, ("jobs", i))) for i, entry in enumerate(found.jobs)]


def _wanted(defaults: Settings, entry: JobEntry, home: str, line: int) -> Wanted:
    merged = {name: getattr(defaults, name) for name in Settings.model_fields}
    merged |= {name: getattr(entry, name) for name in Settings.model_fields if name in entry.model_fields_set}
    layouts: Any = merged.pop("layout")
    for name in ("hf_config", "base"):
        merged[name] = _near(home, merged[name]) if merged[name] else None
    steps: Any = entry.steps or ([entry.step] if isinstance(entry.step, int) else "newest")
    return Wanted(
        line=line,
        checkpoint=_whole(home, entry.checkpoint),
        out=_whole(home, entry.out),
        steps=steps if steps in ("all", "newest") else list(dict.fromkeys(steps)),
        layouts=list(dict.fromkeys(layouts if isinstance(layouts, list) else [layouts])),
        settings={f.name: merged[f.name] for f in fields(Options) if f.name in merged},
    )


def _whole(home: str, path: str) -> str:
    return path if path.startswith("/") or "://" in path else join(home, path)


def _near(home: str, given: str) -> str:
    """A path beside the file where there is one; else as it stands, for it may be a Hub id."""
    path = _whole(home, given)
    store = store_for(path)
    return path if store.stat(path) or store.listdir(path) else given


def _doubled(node: yaml.Node | None, seen: set[int]) -> list[tuple[int, str]]:
    """Keys that a mapping has twice: YAML's readers keep the last one without a word."""
    if node is None or id(node) in seen:
        return []
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return list(itertools.chain.from_iterable(_doubled(item, seen) for item in node.value))
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [key.value for key, _ in node.value]
    here = [
        (key.start_mark.line + 1, key.value)
        for i, (key, _) in enumerate(node.value)
        if isinstance(key, yaml.ScalarNode) and key.value in names[:i]
    ]
    return here + list(itertools.chain.from_iterable(_doubled(value, seen) for _, value in node.value))


def _line(node: yaml.Node | None, where: Sequence[int | str]) -> int:
    """The line of what a pydantic location names, or of the nearest thing around it."""
    line = node.start_mark.line + 1 if node else 1
    for part in where:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == part), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _sentence(error: Any, data: Any) -> str:
    """Pydantic's words, with the names of the file instead of the program's. Of a field that takes several kinds of
    values, pydantic tells one error a kind: all become the same sentence, with the whole value."""
    loc = error["loc"]
    path = loc[: {"jobs": 3, "defaults": 2}.get(loc[0], 1)] if loc else ()
    where, name = ".".join(map(str, path)), str(path[-1]) if path else ""
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "extra_forbidden":
        known = JobEntry.model_fields if "jobs" in loc else Settings.model_fields
        known = BatchFile.model_fields if len(loc) == 1 else known
        near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        return f"{where} is not known; {hint} are {', '.join(sorted(known))}"
    if name in _CHOICES:
        return f"{where} = {_at(data, path)!r}: {_CHOICES[name]} was expected"
    if error["type"] in ("too_short", "string_too_short"):
        return f"{where} is empty; {'at least one job' if name == 'jobs' else 'something'} must stand there"
    if error["type"] == "list_type":
        return f"{where} = {error['input']!r}: a list was expected"
    if error["type"] == "value_error":
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    return f"{where} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _at(data: Any, path: Sequence[int | str]) -> Any:
    for part in path:
        data = data[part]
    return data
