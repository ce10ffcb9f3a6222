"""The canonical layout as a table over Hugging Face names: what vLLM joins, stacks, transposes and renames.

Names here are endings within one layer (`self_attn.q_proj.weight`), with `{expert}` for an expert's number. The facts
were read off what vLLM 0.32's models hold after `load_weights`; the tests compare with dumps of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Fusion:
    """`parts` one after another along rows make `target`. Parts with `{expert}` are stacked over experts first (then
    rows are the second dimension). `permute` reorders a part's dimensions."""

    target: str
    parts: tuple[str, ...]
    permute: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face tensor's place: its dimensions permuted, then from row `start` on. With `stacked` the target has
    a leading expert dimension that the part has not. With `halves` the rows of each head are put in another order:
    neighbours (2i, 2i+1) become halves [even; odd]."""

    name: str
    permute: tuple[int, ...]
    start: int
    stacked: bool
    halves: bool = False


@dataclass(frozen=True, slots=True)
class Fused:
    """One canonical tensor of a layer and where its rows come from."""

    target: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def _gated(*blocks: str) -> tuple[Fusion, ...]:
    return tuple(Fusion(f"{b}.gate_up_proj.weight", (f"{b}.gate_proj.weight", f"{b}.up_proj.weight")) for b in blocks)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Fusion, ...]:
    return (
        Fusion(f"{block}.routed_experts.w13_weight", tuple(f"{block}.{EXPERT}.{n}.weight" for n in (gate, up))),
        Fusion(f"{block}.routed_experts.w2_weight", (f"{block}.{EXPERT}.{down}.weight",)),
    )


def _whole_experts(block: str, permute: tuple[int, ...] | None) -> tuple[Fusion, ...]:
    routed = f"{block}.routed_experts"
    return (
        Fusion(f"{routed}.w13_weight", (f"{block}.gate_up_proj",), permute),
        Fusion(f"{routed}.w2_weight", (f"{block}.down_proj",), permute),
        Fusion(f"{routed}.w13_bias", (f"{block}.gate_up_proj_bias",)),
        Fusion(f"{routed}.w2_bias", (f"{block}.down_proj_bias",)),
    )


_COMMON: tuple[Fusion, ...] = (
    *(
        Fusion(f"self_attn.qkv_proj.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"))
        for kind in ("weight", "bias")
    ),
    *_gated("mlp", "mlp.shared_expert", "mlp.shared_experts", "feed_forward", "feed_forward.shared_expert"),
    Fusion("self_attn.fused_qkv_a_proj.weight", ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")),
    Fusion("linear_attn.in_proj_qkvz.weight", ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight")),
    Fusion("linear_attn.in_proj_ba.weight", ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight")),
    *_experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    *_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_SWAP = (0, 2, 1)
_FAMILY: dict[str, tuple[Fusion, ...]] = {
    "gpt_oss": _whole_experts("mlp.experts", _SWAP),
    "gemma4": _whole_experts("experts", None),
    "qwen3_5_moe": _whole_experts("mlp.experts", None),  # the fused form that some exporters write
    "qwen3_moe": _whole_experts("mlp.experts", None),
    "qwen3_next": _whole_experts("mlp.experts", None),
    "llama4": _whole_experts("feed_forward.experts", _SWAP),
}
# gpt-oss in vLLM: the attention module is `attn`, the embedding `embedding`.
_RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt_oss": (("self_attn.", "attn."), ("model.embed_tokens.", "model.embedding.")),
}
# Where Hugging Face rotates neighbours and vLLM halves, so that vLLM reorders rows while it loads (all layers, those
# without rotary embedding too): Llama4ForCausalLM.permute_qk_weight_for_rotary.
_HALVES: dict[str, tuple[str, ...]] = {"llama4": ("self_attn.q_proj.weight", "self_attn.k_proj.weight")}


def reorders(family: str) -> bool:
    """Whether canonical rows of a family are in another order than Hugging Face's, so that the head size is needed."""
    return family in _HALVES


def fusions(family: str) -> tuple[Fusion, ...]:
    """Every fusion that applies to a family."""
    return _COMMON + _FAMILY.get(family, ())


def rename(family: str, name: str) -> str:
    """vLLM's own word for a module, where it differs from Hugging Face's."""
    for old, new in _RENAMES.get(family, ()):
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def padded(vocabulary: int) -> int:
    """Rows of vLLM's embedding and head: the vocabulary padded to a multiple of 64 with zero rows."""
    return -(-vocabulary // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def fuse(shapes: Mapping[str, tuple[int, ...]], family: str, experts: int = 0) -> list[Fused]:
    """The canonical tensors of one layer.

    Args:
        shapes: Hugging Face endings of the layer to shapes; an expert's tensors stand once, under `{expert}`.
        family: the schema's name.
        experts: how many experts stand behind `{expert}`.

    A fusion whose parts are all missing does not apply. Where the value projection alone is missing, keys serve as
    values and stand twice (Gemma 4's full-attention layers).
    """
    used: set[str] = set()
    fused: list[Fused] = []
    for fusion in fusions(family):
        parts: Sequence[str] = [p for p in fusion.parts if p in shapes]
        if not parts or parts[0] != fusion.parts[0]:
            continue
        if len(parts) < len(fusion.parts):
            if len(parts) != 2 or "v_proj" not in fusion.parts[2]:
                continue
            parts = [*parts, parts[1]]
        used.update(parts)
        fused.append(
            _join(rename(family, fusion.target), parts, shapes, fusion.permute, experts, _HALVES.get(family, ()))
        )
    for name, shape in shapes.items():
        if name not in used:
            order = tuple(range(len(shape)))
            fused.append(Fused(rename(family, name), shape, (Part(name, order, 0, stacked=False),)))
    return fused


def _join(
    target: str,
    parts: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    permute: tuple[int, ...] | None,
    experts: int,
    halves: Sequence[str],
) -> Fused:
    stacked = EXPERT in parts[0]
    placed: list[Part] = []
    start = 0
    rows: tuple[int, ...] = ()
    for name in parts:
        order = permute or tuple(range(len(shapes[name])))
        rows = tuple(shapes[name][d] for d in order)
        placed.append(Part(name, order, start, stacked, name in halves))
        start += rows[0]
    shape = (start, *rows[1:]) if len(parts) > 1 or stacked else rows
    return Fused(target, (experts, *shape) if stacked else shape, tuple(placed))
