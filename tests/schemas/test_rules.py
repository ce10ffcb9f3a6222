"""The families' tables as tables: they parse, they cover small models of every kind, and they can be inverted."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import pytest
from data_files import DATA, folded, is_text, raw_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx2vllm.converter.conversion import plan
from mtx2vllm.converter.expect import units
from mtx2vllm.converter.plans import Move, Plan, apply
from mtx2vllm.schemas import FAMILIES, SCHEMAS
from mtx2vllm.schemas.model import model_of, schema_of
from mtx2vllm.schemas.rules import ConfigError, Rule, expect_pattern, need, parse_axes

CONFIGS = {p.parent.parent.name: json.loads(p.read_text()) for p in sorted(DATA.glob("*/hf/config.json"))}
PUBLIC = {p.stem: json.loads(p.read_text()) for p in sorted((DATA / "configs").glob("*.json"))}


def rules_of(config: Mapping[str, Any]) -> list[Rule]:
    schema = schema_of(config)
    model = model_of(config, schema)
    return [e.rule for scanned in (True, False) for unit in units(schema, model, scanned) for e in unit.leaves]


def test_every_family_has_a_config_here() -> None:
    assert {schema_of(c).family for c in (*CONFIGS.values(), *PUBLIC.values())} == {s.family for s in FAMILIES}
    assert len(SCHEMAS) == sum(len(s.architectures) for s in FAMILIES)


@pytest.mark.parametrize("name", [*CONFIGS, *PUBLIC])
def test_axes_of_every_rule(name: str) -> None:
    """They parse; what is lost on the way to the target stands as an index in its name; a join or a part names an axis."""
    for rule in rules_of(CONFIGS.get(name) or PUBLIC[name]):
        source, target = parse_axes(rule.axes)
        left, right = ({a for dim in side for a in dim} for side in (source, target))
        assert left - right == ({"expert"} if "{expert}" in rule.target else set())
        for axis in (rule.join, rule.weave, rule.part and rule.part[0]):
            assert axis is None or axis in right


@pytest.mark.parametrize("axes", ["a b", "a a -> a", "a -> b", "(a b) c -> (a d) c", "a b -> a b b"])
def test_malformed_axes(axes: str) -> None:
    with pytest.raises(ValueError, match="axes"):
        parse_axes(axes)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layers", [1, 2, 4, 6, 7, 14])
def test_a_plan_for_any_number_of_layers(family: str, layers: int) -> None:
    """Every layer is there once, and a scanned tree gives the tensors of an unscanned one."""
    config = json.loads(json.dumps(CONFIGS[family]))
    body = config.get("text_config", config)
    body["num_hidden_layers"] = layers
    body.pop("layer_types", None)
    if "first_k_dense_replace" in body:
        body["first_k_dense_replace"] = min(1, layers)
    if family.startswith("gemma2") and layers % 2:
        with pytest.raises(Exception, match="in pairs"):
            plan(config)
        return
    made = {
        (lay, scan): plan(config, layout=lay, scanned=scan) for lay in ("hf", "canonical") for scan in (True, False)
    }
    for lay in ("hf", "canonical"):
        scanned, unscanned = made[lay, True], made[lay, False]
        assert {t.name: t for t in scanned.tensors} == {t.name: t for t in unscanned.tensors}
        numbers = {int(t.name.split("layers.")[1].split(".")[0]) for t in scanned.tensors if "layers." in t.name}
        assert numbers == set(range(layers))


COUNTS = {
    ("qwen3-30b-a3b", "canonical"): 435,
    ("qwen3.5-35b-a3b", "canonical"): 573,
    ("qwen3-30b-a3b", "hf"): 48 * (9 + 3 * 128) + 3,
    ("llama3.1-405b", "hf"): 126 * 9 + 3,
    ("llama3.1-405b", "canonical"): 126 * 6 + 3,
    ("qwen3-0.6b", "hf"): 28 * 11 + 2,
    ("deepseek3-671b", "hf"): 61 * 9 + 3 * 3 + 58 * (5 + 3 * 256) + 3,
    ("gpt-oss-120b", "hf"): 36 * 17 + 3,
    ("mixtral-8x22b", "hf"): 56 * (6 + 1 + 24) + 3,
}


@pytest.mark.parametrize(("name", "layout"), COUNTS)
def test_counts_of_public_models(name: str, layout: str) -> None:
    assert len(plan(PUBLIC[name], layout=layout).tensors) == COUNTS[name, layout]


PARAMETERS = {  # as their makers count them, embeddings included; billions
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "qwen3-480b-a35b": 480.2, "llama3.1-8b": 8.03, "llama3.1-70b": 70.6,
    "llama3.1-405b": 405.9, "mixtral-8x22b": 140.6, "deepseek3-671b": 671.0, "qwen2.5-7b": 7.62, "qwen3-8b": 8.19,
    "gemma2-27b": 27.2, "gemma3-27b": 27.0, "olmo3-32b": 32.2, "gpt-oss-120b": 116.8, "qwen3-next-80b-a3b": 79.7,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_public_models(name: str) -> None:
    made = plan(PUBLIC[name], layout="hf")
    count = sum(int(np.prod(t.shape, dtype=np.int64)) for t in made.tensors)
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.004)


@pytest.mark.parametrize("name", PUBLIC)
def test_canonical_bytes_are_those_of_hf_and_the_vocabularys_padding(name: str) -> None:
    hf, canonical = plan(PUBLIC[name], layout="hf"), plan(PUBLIC[name])
    doubled = (
        canonical.nbytes - sum(t.nbytes // t.shape[0] * t.pad_rows for t in canonical.tensors if t.pad_rows) - hf.nbytes
    )
    if "gemma4" in name:  # keys that serve as values stand twice
        assert doubled > 0
    else:
        wide = sum(t.nbytes // 2 for t in canonical.tensors if t.dtype == "float32")  # kept in float32 for vLLM
        assert doubled == wide


def backwards(move: Move, tensors: Mapping[int, np.ndarray], leaf: np.ndarray) -> None:
    """Undo one move: numpy, written against the definition in `converter.plan`, not with it."""
    order = [a for axes in move.source for a in axes]
    split = leaf.reshape([move.sizes[a] for a in order])
    taken = split[tuple(slice(*move.window.get(a, (0, move.sizes[a]))) for a in order)]
    wanted = [*move.index, *(a for axes in move.target for a in axes)]
    view = taken.transpose([order.index(a) for a in wanted])
    for at in np.ndindex(view.shape[: len(move.index)]):
        spots = tuple(slice(s, s + n * k, k) for s, n, k in zip(move.start, move.block, move.step, strict=True))
        view[at] = tensors[int(move.tensors[at])][spots].reshape(view[at].shape)


def there_and_back(made: Plan) -> None:
    """Tensors of distinct numbers -> leaves -> tensors: nothing is lost, nothing is doubled."""
    tensors, start = {}, 1
    for number, t in enumerate(made.tensors):
        size = int(np.prod(t.shape, dtype=np.int64))
        values = np.arange(start, start + size, dtype=np.float64).reshape(t.shape)
        if t.pad_rows:
            values[-t.pad_rows :] = 0
        tensors[number], start = values, start + size
    leaves = {m.leaf.path: np.zeros(m.leaf.shape) for m in made.moves}
    for move in made.moves:
        backwards(move, tensors, leaves[move.leaf.path])
    assert all(leaf.all() for leaf in leaves.values()), "a part of a leaf goes nowhere"
    again = {n: np.zeros_like(t) for n, t in tensors.items()}
    for move in made.moves:
        apply(replace(move, op=None), leaves[move.leaf.path], again)
    for number, values in tensors.items():
        np.testing.assert_array_equal(again[number], values)


# In the canonical layout of Gemma 4, keys that serve as values stand twice: that one has no inverse.
INVERTIBLE = [(f, lay) for f in CONFIGS for lay in ("hf", "canonical") if lay == "hf" or not f.startswith("gemma4")]


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize(("family", "layout"), INVERTIBLE)
def test_every_table_can_be_inverted(family: str, scanned: bool, layout: str) -> None:
    there_and_back(plan(CONFIGS[family], scanned=scanned, layout=layout))


# Models that MaxText itself initialized have a config here and no Hugging Face original.
ORIGINALS = [f for f in CONFIGS if any((DATA / f / "hf").glob("*.safetensors"))]


@pytest.mark.parametrize("family", ORIGINALS)
def test_names_and_shapes_are_the_originals(family: str) -> None:
    """Against the files that transformers saved, by config alone."""
    original = {folded(n): s for n, (_, s, _) in raw_tensors(DATA / family / "hf").items() if is_text(n)}
    assert {t.name: t.shape for t in plan(CONFIGS[family], layout="hf").tensors} == original


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b"]), max_size=9))
def test_patterns_of_layers(kinds: list[str]) -> None:
    fits = all(kind == "aab"[n % 3] for n, kind in enumerate(kinds))
    if fits:
        expect_pattern({"layer_types": kinds}, ("a", "a", "b"), "x")
    else:
        with pytest.raises(ConfigError, match="layer_types"):
            expect_pattern({"layer_types": kinds}, ("a", "a", "b"), "x")


@pytest.mark.parametrize("value", [None, "1", 1.0, True, -1])
def test_numbers_that_are_needed(value: object) -> None:
    with pytest.raises(ConfigError, match="key is "):
        need({"key": value}, "key", 0)
    assert need({"key": 0}, "key", 0) == 0
