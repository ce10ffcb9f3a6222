"""Decide a conversion from metadata alone: what is read, what is written, under which names. No weight is touched."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version as package_version
from typing import Any

from mtx2vllm.converter import base as bases
from mtx2vllm.converter import hf_files
from mtx2vllm.converter.compile import TEXT, compile_plan
from mtx2vllm.converter.errors import InputError, UsageError
from mtx2vllm.converter.execute.schedule import Schedule, needs_of
from mtx2vllm.converter.expect import is_scanned, predict, units
from mtx2vllm.converter.infer import infer
from mtx2vllm.converter.options import Location, Options, refuse_misuse
from mtx2vllm.converter.plans import Plan
from mtx2vllm.converter.shards import ShardFile, layout
from mtx2vllm.converter.source import Checkpoint, open_checkpoint
from mtx2vllm.converter.storage import store_for
from mtx2vllm.schemas.fused import reorders
from mtx2vllm.schemas.manifest import CANONICAL_DIR
from mtx2vllm.schemas.model import ConfigError, architecture_of, default_rope, model_of, schema_of
from mtx2vllm.schemas.rules import Model, Schema

_CANONICAL_WRAPPER = ("language_model.model.", "language_model.")  # vLLM's names in every multimodal class


@dataclass(frozen=True)
class Job:
    """A conversion that is decided and has not begun."""

    checkpoint: Checkpoint
    plan: Plan
    shards: tuple[ShardFile, ...]
    config: dict[str, Any] | None  # config.json to write
    side: Mapping[str, str]  # further files -> where they are
    notes: tuple[str, ...]  # what a user should know, one sentence each
    copies: bases.Copies  # tensors taken over from --base, with shards of their own
    copy_shards: tuple[ShardFile, ...]
    options: Options

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return self.plan.nbytes + sum(t.nbytes for t in self.copies.tensors)

    def schedule(self, out: str) -> Schedule:
        """How the budget is used for a version at `out`, and what a run needs.

        Raises:
            InputError: the budget is too small; says by how much.
        """
        remote_source, remote_sink = (store_for(at).local(at) is None for at in (self.checkpoint.items, out))
        return needs_of(self.plan, self.options.memory_budget, remote_source=remote_source, remote_sink=remote_sink)


def plan(
    hf_config: Location | Mapping[str, Any], *, layout: str = "canonical", scanned: bool = True, dtype: str = "bfloat16",
    rope: str | None = None,
) -> Plan:  # fmt: skip
    """What a config will become: no checkpoint needed.

    Args:
        hf_config: a path (string or `pathlib.Path`), a Hub id, or config.json's content.
        layout: `canonical` or `hf`.
        scanned: plan for a checkpoint that stacks its layers.
        dtype: of the weights written.
        rope: `interleaved` or `half` for Llama.

    Raises:
        InputError: the config is missing, unknown or incomplete.
    """
    refuse_misuse(Options(layout=layout, dtype=dtype, rope=rope))
    config, where = (hf_config, "the config") if isinstance(hf_config, Mapping) else _given(os.fspath(hf_config))
    schema, model = _described(config, rope, where)
    leaves = predict(units(schema, model, scanned))
    return compile_plan(
        schema, model, leaves, layout=layout, scanned=scanned, dtype=dtype,
        **_naming(config, schema, layout, base=None), conventions=_conventions(schema, model, rope, scanned),
    )  # fmt: skip


def prepare(checkpoint: str, options: Options) -> Job:
    """Decide everything from metadata; no weight is read.

    Raises:
        InputError: anything about the checkpoint, the config, or how they fit; all problems at once.
        UsageError: options that contradict each other.
    """
    refuse_misuse(options)
    opened = open_checkpoint(checkpoint, options.step, options.allow_uncommitted)
    if opened.custom.get("lora"):
        raise InputError(
            f"{checkpoint} holds LoRA adapters, not whole weights; merge them in MaxText and convert the result"
        )
    source = hf_files.find_config(options.hf_config or options.base, checkpoint)
    notes: list[str] = []
    if source is None:
        schema, model, config = _inferred(checkpoint, opened, options, notes)
    else:
        config = source.config
        schema, model = _described(config, options.rope, source.where)
        notes.append(f"config: {source.where}")
    scanned = is_scanned(schema, model, opened.leaves)
    if schema.family == "llama":
        notes.append(f"rotary convention: {_rope(model)} (choose with --rope; a checkpoint cannot tell)")
    naming = _naming(config or {}, schema, options.layout, options.base)
    made = compile_plan(
        schema, model, opened.leaves, layout=options.layout, scanned=scanned, dtype=options.dtype,
        text_only=options.text_only, conventions=_conventions(schema, model, options.rope, scanned), **naming,
    )  # fmt: skip
    made = replace(made, drops=(*opened.drops, *made.drops))
    written: dict[str, Any] | None = None
    changes: list[str] = []
    if config is not None:
        whole = options.layout == "canonical" or options.base is not None
        dtype = _dominant(made)
        written, changes = hf_files.written_config(config, schema, naming["architecture"], dtype, whole=whole)
    notes += [f"config.json: {change}" for change in changes]
    copies = bases.copies(options.base, made, tied="tied" in model.flags) if options.base else bases.Copies((), ())
    if copies.tensors:
        notes.append(f"{len(copies.tensors)} tensors that MaxText does not train are copied from {options.base}")
    shards, copy_shards = _shards(made, copies, options)
    side = hf_files.side_files(source)
    return Job(opened, made, shards, written, side, tuple(notes), copies, copy_shards, options)


def _given(hf_config: str) -> tuple[Mapping[str, Any], str]:
    source = hf_files.find_config(hf_config, None)
    return (source.config, source.where) if source else ({}, hf_config)


def _described(config: Mapping[str, Any], rope: str | None, where: str) -> tuple[Schema, Model]:
    try:
        schema = schema_of(config)
        if rope and schema.family != "llama":
            raise UsageError(f"--rope is for Llama and Mistral; {schema.family} ({where}) has one convention only")
        return schema, model_of(config, schema, rope)
    except ConfigError as error:
        raise InputError(f"{where} cannot be used: {error}; name the model's own config with --hf-config") from None


def _inferred(
    checkpoint: str, opened: Checkpoint, options: Options, notes: list[str]
) -> tuple[Schema, Model, dict[str, Any] | None]:
    if options.layout == "hf":
        raise InputError(
            f"no config.json was found in {checkpoint} or above it, and the hf layout needs one; pass --hf-config with a "
            "Hugging Face config.json, a directory with one, or a Hub id"
        )
    schema, model = infer(opened.leaves)
    notes.append(
        f"no config.json was found: keys and shapes say {schema.family}; none is written, so the version cannot be served "
        "cold (pass --hf-config to have one)"
    )
    return schema, model, None


def _naming(config: Mapping[str, Any], schema: Schema, layout: str, base: str | None) -> dict[str, Any]:
    """Architecture and prefix of what is written: canonical keeps the source's wrapper, hf writes the text model alone
    unless a whole model is asked for."""
    source = architecture_of(config, schema) if config else schema.text
    if source == schema.wrapper and (layout == "canonical" or base):
        names = _CANONICAL_WRAPPER if layout == "canonical" else schema.wrapper_names
        return {"architecture": source, "names": names}
    return {"architecture": schema.text if source == schema.wrapper else source, "names": TEXT}


def _rope(model: Model) -> str:
    return "interleaved" if "interleaved" in model.flags else "half"


def _conventions(schema: Schema, model: Model, rope: str | None, scanned: bool) -> dict[str, str]:
    chosen = {"layers": "scanned" if scanned else "unscanned"}
    if schema.family == "llama":
        chosen["rope"] = _rope(model)
        chosen["rope_chosen_by"] = (
            "--rope" if rope else f"default for the config's rope type ({default_rope(model.config)})"
        )
    if reorders(schema.family):
        chosen["head_dim"] = str(model.sizes["head_dim"])  # which fusing the hf layout needs
    return chosen


def _dominant(made: Plan) -> str:
    """The dtype that most bytes have."""
    sizes: dict[str, int] = {}
    for tensor in made.tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda d: sizes[d], default="bfloat16")


def _shards(made: Plan, copies: bases.Copies, options: Options) -> tuple[tuple[ShardFile, ...], tuple[ShardFile, ...]]:
    metadata = {"layout": options.layout, "tool": f"mtx2vllm {package_version('mtx2vllm')}"}
    found = layout(made.tensors, options.max_shard_size, metadata)
    if options.layout == "canonical":
        return tuple(replace(shard, name=f"{CANONICAL_DIR}/{shard.name}") for shard in found), ()
    if not copies.tensors:
        return tuple(found), ()
    return bases.joined(found, layout(copies.tensors, options.max_shard_size, metadata))


__all__ = ["CANONICAL_DIR", "Job", "Options", "plan", "prepare"]
