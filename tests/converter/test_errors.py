"""Bad input: one clear sentence, all problems at once, the documented exit status, and OUT as it was before."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from data_files import DATA, arrays
from make_run import read_step, write_step

from mtx2vllm.converter import conversion
from mtx2vllm.converter.cli import main
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import (
    DifferenceError,
    InputError,
    LostRace,
    Mtx2vllmError,
    NotCommitted,
    StorageError,
    UsageError,
    from_os_error,
)
from mtx2vllm.converter.version.publish import Publisher

QWEN3 = str(DATA / "qwen3" / "hf")
PREFIX = "params.params.decoder."


def run(*arguments: object) -> tuple[int, list[str]]:
    """Exit status and the sentences on stderr."""
    answer = CliRunner().invoke(main, [str(a) for a in arguments])
    assert "fault in mtx2vllm" not in answer.stderr, answer.stderr
    assert "Traceback" not in answer.output
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    said = answer.stderr.splitlines()
    return answer.exit_code, [line.removeprefix("error: ") for line in said if line.startswith("error: ")]


def fails(status: int, *arguments: object) -> str:
    """The one sentence of a run that fails with `status`."""
    code, said = run(*arguments)
    assert code == status, (code, said)
    assert len(said) == 1, said
    return said[0]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of qwen3's scanned run that a test may break."""
    return shutil.copytree(DATA / "qwen3" / "scanned", tmp_path / "run")


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """The same with one directory an array."""
    return shutil.copytree(DATA / "variants" / "qwen3-scanned-noocdbt", tmp_path / "run")


def rewritten(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], family: str = "qwen3") -> Path:
    """qwen3's arrays, changed and written anew."""
    scan = "scanned" if (DATA / family / "scanned").is_dir() else "unscanned"
    found = read_step(DATA / family / scan / "0")
    change(found)
    return write_step(tmp_path / "changed" / "0", found).parent


def config(tmp_path: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A family's config with some keys changed (None: removed)."""
    content = json.loads((DATA / family / "hf" / "config.json").read_text())
    for key, value in changes.items():
        body = content.get("text_config", content) if key not in {"architectures", "model_type"} else content
        body.pop(key, None) if value is None else body.update({key: value})
    path = tmp_path / "config" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


# -- the tree of exceptions


def test_exit_statuses_are_the_documented_ones() -> None:
    expected = {
        Mtx2vllmError: 1,
        UsageError: 2,
        InputError: 3,
        NotCommitted: 3,
        LostRace: 3,
        StorageError: 3,
        DifferenceError: 4,
    }
    assert {kind: kind.exit_status for kind in expected} == expected


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(28, "No space left on device", "/x"), 1, "/x: the disk is full"),
        (OSError(122, "Disk quota exceeded"), 1, "quota"),
        (FileNotFoundError(2, "No such file", "/x"), 3, "/x: no such file"),
        (PermissionError(13, "Permission denied", "/x"), 3, "permission denied"),
        (NotADirectoryError(20, "Not a directory", "/x"), 3, "Not a directory"),
        (OSError(5, "Input/output error", "/x"), 1, "/x: Input/output error"),
    ],
)
def test_refusals_of_the_system_become_sentences(error: OSError, status: int, words: str) -> None:
    found = from_os_error(error)
    assert found.exit_status == status
    assert words in str(found)


# -- where is the checkpoint?


def test_no_such_path(tmp_path: Path) -> None:
    said = fails(3, "convert", tmp_path / "none", tmp_path / "out", "--hf-config", QWEN3)
    assert f"{tmp_path}/none does not exist or is empty" in said
    assert not (tmp_path / "out").exists()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").touch()
    assert "is no MaxText checkpoint" in fails(3, "convert", tmp_path / "docs", tmp_path / "out", "--hf-config", QWEN3)
    assert "is a file" in fails(3, "convert", tmp_path / "docs" / "a.txt", tmp_path / "out", "--hf-config", QWEN3)


def test_only_temporary_steps(copy: Path, tmp_path: Path) -> None:
    (copy / "0").rename(copy / "7.orbax-checkpoint-tmp-123")
    said = fails(3, "convert", copy, tmp_path / "out", "--hf-config", QWEN3)
    assert "still being written" in said
    assert "--allow-uncommitted" in said
    temporary = copy / "7.orbax-checkpoint-tmp-123"
    assert temporary.name in fails(3, "convert", temporary, tmp_path / "out", "--hf-config", QWEN3)
    for location in (copy, temporary, temporary / "items"):
        done = convert(str(location), str(tmp_path / "out"), hf_config=QWEN3, allow_uncommitted=True, overwrite=True)
        assert done.step == 7


def test_the_newest_step_by_number_among_everything_that_orbax_leaves(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy / "0", copy / "9")
    (copy / "0").rename(copy / "10")
    for name in ("11.orbax-checkpoint-tmp-9", "_todelete_", "_SNAPSHOTS", "abc", "٣", "²", "-12", "1e3", "9" * 30):
        shutil.copytree(copy / "9", copy / name)
    (copy / "12").touch()
    assert convert(str(copy), str(tmp_path / "out"), hf_config=QWEN3).step == 10
    assert convert(str(copy), str(tmp_path / "nine"), hf_config=QWEN3, step=9).step == 9
    assert "no committed step 3; its steps are 9, 10" in fails(
        3, "convert", copy, tmp_path / "o", "--step", 3, "--hf-config", QWEN3
    )
    assert "is step 9, not step 10" in fails(
        3, "convert", copy / "9", tmp_path / "o", "--step", 10, "--hf-config", QWEN3
    )


def test_every_way_to_name_a_step(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    copy.rename(tmp_path / "whole" / "checkpoints")
    whole = tmp_path / "whole"
    for n, where in enumerate((whole, whole / "checkpoints", whole / "checkpoints/0", whole / "checkpoints/0/items")):
        for form in (str(where), f"{where}/"):
            assert convert(form, str(tmp_path / f"out{n}"), hf_config=QWEN3, overwrite=True).step == 0


def test_a_half_copied_step(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy / "0", copy / "5")
    (copy / "5" / "items" / "_METADATA").unlink()
    said = fails(3, "convert", copy, tmp_path / "out", "--hf-config", QWEN3)
    assert "step 5" in said
    assert "_METADATA" in said
    assert "--step (0)" in said


def test_a_copy_without_markers_counts_on_a_disk(copy: Path, tmp_path: Path) -> None:
    for marker in copy.rglob("commit_success.txt"):
        marker.unlink()
    assert convert(str(copy), str(tmp_path / "out"), hf_config=QWEN3).step == 0


# -- is it whole?


def largest(run: Path) -> Path:
    return max((run / "0/items/ocdbt.process_0/d").iterdir(), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("variant", ["qwen3/scanned", "variants/qwen3-scanned-zarr2"])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_a_truncated_or_missing_data_file(tmp_path: Path, variant: str, damage: str) -> None:
    run_dir = shutil.copytree(DATA / variant, tmp_path / "run")
    file = largest(run_dir)
    os.truncate(file, file.stat().st_size // 2) if damage == "truncated" else file.unlink()
    said = fails(3, "convert", run_dir, tmp_path / "out", "--hf-config", QWEN3)
    assert "params.params." in said
    assert "copy" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["d", "manifest.ocdbt"])
def test_a_missing_index_is_one_sentence_for_all_leaves(copy: Path, tmp_path: Path, part: str) -> None:
    path = copy / "0" / "items" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = fails(3, "convert", copy, tmp_path / "out", "--hf-config", QWEN3)
    assert "decoder.decoder_norm.scale" in said
    assert "and 10 more" in said


def test_a_missing_leaf_is_named_and_never_becomes_zeros(loose: Path, tmp_path: Path) -> None:
    items = loose / "0" / "items"
    shutil.rmtree(items / f"{PREFIX}layers.self_attention.query_norm.scale")
    said = fails(3, "convert", loose, tmp_path / "out", "--hf-config", QWEN3)
    assert "decoder.layers.self_attention.query_norm.scale" in said
    assert "NOT_FOUND" in said


def test_a_missing_chunk_is_named_and_never_becomes_zeros(loose: Path, tmp_path: Path) -> None:
    chunks = sorted((loose / "0" / "items" / f"{PREFIX}layers.mlp.wi_0.kernel").glob("[0-9]*"))
    chunks[1].unlink()
    assert f"{PREFIX}layers.mlp.wi_0.kernel" in fails(3, "convert", loose, tmp_path / "out", "--hf-config", QWEN3)
    assert not (tmp_path / "out").exists()


# -- does it fit?


def test_leaves_that_the_metadata_lack_or_add(tmp_path: Path) -> None:
    def change(found: dict[str, np.ndarray]) -> None:
        del found[f"{PREFIX}decoder_norm.scale"]
        del found[f"{PREFIX}layers.mlp.wo.kernel"]
        found[f"{PREFIX}layers.mlp.extra.kernel"] = np.zeros((2, 3), np.float32)

    code, said = run("convert", rewritten(tmp_path, change), tmp_path / "out", "--hf-config", QWEN3)
    assert code == 3
    assert len(said) == 3
    assert "leaf decoder.layers.mlp.extra.kernel [2, 3] is not known to family qwen3" in said[0]
    assert "decoder.decoder_norm.scale is missing" in said[1]
    assert "decoder.layers.mlp.wo.kernel is missing" in said[2]


def test_a_config_of_another_size_names_axes_and_both_numbers(tmp_path: Path) -> None:
    path = config(tmp_path, hidden_size=128, intermediate_size=80, num_key_value_heads=4)
    code, said = run("convert", DATA / "qwen3/scanned", tmp_path / "out", "--hf-config", path)
    assert code == 3
    assert len(said) == 3
    found = "\n".join(said)
    assert "axis embed is 64 in the checkpoint and 128 by config.json (hidden_size)" in found
    assert "axis ffn is 96 in the checkpoint and 80 by config.json (intermediate_size)" in found
    assert "axis kv_heads is 2 in the checkpoint and 4 by config.json (num_key_value_heads)" in found


LAYERS = [
    ("qwen3", "scanned", 3, 2), ("qwen3", "scanned", 3, 4), ("qwen3", "unscanned", 3, 2), ("qwen3", "unscanned", 3, 5),
    ("deepseek3", "scanned", 5, 4), ("deepseek3", "unscanned", 5, 6), ("gpt-oss", "unscanned", 4, 2), ("gemma2", "scanned", 4, 6),
    ("gemma3", "scanned", 14, 13), ("gemma3", "scanned", 14, 8), ("gemma3", "scanned", 14, 6), ("gemma3", "scanned", 14, 20),
    ("qwen3.5-moe", "scanned", 8, 4), ("qwen3-next", "scanned", 8, 12), ("gemma4", "scanned", 12, 18), ("olmo3", "scanned", 8, 4),
]  # fmt: skip


@pytest.mark.parametrize(("family", "scan", "have", "want"), LAYERS)
def test_another_number_of_layers_is_one_sentence_with_both(
    family: str, scan: str, have: int, want: int, tmp_path: Path
) -> None:
    path = config(tmp_path, family, num_hidden_layers=want, layer_types=None, per_layer_config=None)
    if family == "gemma4":  # its full layers' sizes stand in per_layer_config
        path = config(tmp_path, family, num_hidden_layers=want)
    said = fails(3, "convert", DATA / family / scan, tmp_path / "out", "--hf-config", path)
    assert f"the checkpoint has {have} layers and config.json says {want} (num_hidden_layers)" in said


def test_a_misplaced_border_between_dense_and_expert_layers(tmp_path: Path) -> None:
    first = json.loads((DATA / "deepseek3/hf/config.json").read_text())["first_k_dense_replace"]
    path = config(tmp_path, "deepseek3", first_k_dense_replace=first + 1)
    code, said = run("convert", DATA / "deepseek3/scanned", tmp_path / "out", "--hf-config", path)
    assert code == 3
    assert 1 <= len(said) <= 2
    assert "axis layer" in said[0]


def test_a_head_of_its_own_beside_a_tied_config(tmp_path: Path) -> None:
    path = config(tmp_path, "qwen3-untied", tie_word_embeddings=True)
    said = fails(3, "convert", DATA / "qwen3-untied/scanned", tmp_path / "out", "--hf-config", path)
    assert "decoder.logits_dense.kernel is a head of its own" in said
    assert "tie_word_embeddings" in said


def test_a_tied_checkpoint_beside_an_untied_config(tmp_path: Path) -> None:
    path = config(tmp_path, tie_word_embeddings=False)
    said = fails(3, "convert", DATA / "qwen3/scanned", tmp_path / "out", "--hf-config", path)
    assert "decoder.logits_dense.kernel is missing" in said
    assert "tied" in said


def test_vision_leaves_are_refused_by_name_unless_left_out(tmp_path: Path) -> None:
    def change(found: dict[str, np.ndarray]) -> None:
        found["params.params.vision_encoder.patch.kernel"] = np.zeros((2, 3), np.float32)
        found["params.params.vision_encoder.patch.bias"] = np.zeros(3, np.float32)

    changed = rewritten(tmp_path, change)
    said = fails(3, "convert", changed, tmp_path / "out", "--hf-config", QWEN3)
    assert "vision_encoder.patch" in said
    assert "--text-only" in said
    assert "1 more" in said
    done = convert(str(changed), str(tmp_path / "out"), hf_config=QWEN3, text_only=True)
    assert done.tensors == 26


def test_a_padded_vocabulary_is_cut_and_a_smaller_one_refused(tmp_path: Path) -> None:
    def pad(found: dict[str, np.ndarray]) -> None:
        key = "params.params.token_embedder.embedding"
        found[key] = np.pad(found[key], [(0, 44), (0, 0)])

    changed = rewritten(tmp_path, pad)
    convert(str(changed), str(tmp_path / "out"), hf_config=QWEN3, layout="hf")
    assert arrays(tmp_path / "out")["model.embed_tokens.weight"].shape == (256, 64)
    original = arrays(DATA / "qwen3/hf")["model.embed_tokens.weight"]
    assert arrays(tmp_path / "out")["model.embed_tokens.weight"].tobytes() == original.tobytes()
    shown = CliRunner().invoke(main, ["convert", str(changed), "x", "--hf-config", QWEN3, "--dry-run"])
    assert "token_embedder.embedding[256:300]" in shown.stdout
    said = fails(3, "convert", changed, tmp_path / "small", "--hf-config", config(tmp_path, vocab_size=301))
    assert "axis vocab is 300 in the checkpoint and 301 by config.json (vocab_size)" in said


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    def change(found: dict[str, np.ndarray]) -> None:
        found[f"{PREFIX}layers.mlp.wo.kernel"] = np.zeros(found[f"{PREFIX}layers.mlp.wo.kernel"].shape, np.int8)

    said = fails(3, "convert", rewritten(tmp_path, change), tmp_path / "out", "--hf-config", QWEN3)
    assert "wo.kernel is int8" in said
    assert "quantization" in said


def test_the_same_leaf_twice(tmp_path: Path) -> None:
    def change(found: dict[str, np.ndarray]) -> None:
        found["base.decoder.decoder_norm.scale.value"] = found[f"{PREFIX}decoder_norm.scale"]

    said = fails(3, "convert", rewritten(tmp_path, change), tmp_path / "out", "--hf-config", QWEN3)
    assert "base.decoder.decoder_norm.scale.value" in said
    assert f"{PREFIX}decoder_norm.scale" in said


def test_lora_adapters_are_not_weights(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run" / "0", read_step(DATA / "qwen3/scanned/0"), custom={"lora": {"rank": 4}})
    assert "LoRA" in fails(3, "convert", step, tmp_path / "out", "--hf-config", QWEN3)


def test_no_parameters_at_all(tmp_path: Path) -> None:
    step = write_step(
        tmp_path / "run" / "0", {"step": np.zeros((), np.int64), "opt_state.0.count": np.zeros((), np.int32)}
    )
    assert "holds no parameters" in fails(3, "convert", step, tmp_path / "out", "--hf-config", QWEN3)


# -- NaN and infinity


def test_nan_and_infinity_are_counted_and_strict_publishes_nothing(tmp_path: Path) -> None:
    def change(found: dict[str, np.ndarray]) -> None:
        values = found[f"{PREFIX}layers.mlp.wo.kernel"].copy()
        values[3, 1, 5] = np.nan
        values[4, 1, 5:7] = np.inf
        values[4, 2, 0] = -np.inf
        found[f"{PREFIX}layers.mlp.wo.kernel"] = values

    changed = rewritten(tmp_path, change)
    answer = CliRunner().invoke(main, ["convert", str(changed), str(tmp_path / "out"), "--hf-config", QWEN3, "--json"])
    assert answer.exit_code == 0
    assert "warning: tensor model.layers.1.mlp.down_proj.weight holds 1 NaN and 2 infinite values" in answer.stderr
    assert json.loads(answer.stdout)["nonfinite"] == {
        "model.layers.1.mlp.down_proj.weight": [1, 2],
        "model.layers.2.mlp.down_proj.weight": [0, 1],
    }
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    for out in ("new", "out"):
        said = fails(4, "convert", changed, tmp_path / out, "--hf-config", QWEN3, "--strict", "--overwrite")
        assert "2 tensors hold NaN or infinity" in said
    assert not (tmp_path / "new").exists()
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


# -- the config


def test_an_unknown_family_names_itself_and_the_known_ones(tmp_path: Path) -> None:
    path = config(tmp_path, architectures=["FooForCausalLM"])
    said = fails(3, "convert", DATA / "qwen3/scanned", tmp_path / "out", "--hf-config", path)
    assert "FooForCausalLM" in said
    assert "qwen3_moe" in said
    assert str(path) in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"), ("{", "is not JSON"), ("\x00\xff", "is not JSON"), ("[1]", "a JSON object was expected"),
        ("[" * 100_000, "is not JSON"), ("{}", "neither architectures nor model_type"), ("3", "a JSON object was expected"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "hidden_size is missing; vocab_size is missing"),
        ('{"architectures": 5, "model_type": "foo"}', "model type 'foo'"), ('{"architectures": [["x"]]}', "['x']"),
        ('{"architectures": null, "model_type": null}', "None"),
    ],
)  # fmt: skip
def test_a_config_that_is_none(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    for command in (["plan"], ["convert", DATA / "qwen3/scanned", tmp_path / "out"]):
        said = fails(3, *command, "--hf-config", path)
        assert words in said
        assert str(path) in said


def test_an_enormous_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 34)
    assert "far more than a config" in fails(3, "plan", "--hf-config", path)


@pytest.mark.parametrize("value", [0, -1, "64", 64.0, True, None, [], 10**12, 10**400, "x" * 10_000])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_impossible_sizes_are_named(tmp_path: Path, key: str, value: object) -> None:
    said = fails(3, "plan", "--hf-config", config(tmp_path, **{key: value}))
    assert f"{key} is " in said
    assert len(said) < 1000


def test_all_bad_keys_at_once(tmp_path: Path) -> None:
    path = config(tmp_path, hidden_size=0, vocab_size="x", attention_bias=True, num_hidden_layers=None)
    said = fails(3, "plan", "--hf-config", path)
    for words in (
        "hidden_size is 0",
        "vocab_size is 'x'",
        "num_hidden_layers is missing",
        "attention_bias=True is not supported",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
        ("gemma2", {"num_hidden_layers": 3}, "in pairs"),
        ("gemma4", {"layer_types": ["full_attention"] * 12}, "layer_types[0] is 'full_attention'"),
        ("qwen3.5-moe", {"full_attention_interval": 2, "layer_types": None}, "full_attention_interval is 2"),
        ("qwen3-next", {"linear_num_key_heads": 3}, "no multiple of linear_num_key_heads (3)"),
        ("deepseek3", {"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x'"),
        ("deepseek3", {"first_k_dense_replace": 99}, "first_k_dense_replace is 99, more than num_hidden_layers (5)"),
        ("deepseek3", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek3", {"n_shared_experts": None}, "n_shared_experts is missing"),
        ("llama3.1", {"head_dim": 7}, "head_dim is 7"),
        ("llama3.1", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 4}, "layer_types[0]"),
    ],
)
def test_variants_that_no_table_covers_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    assert words in fails(3, "plan", "--hf-config", config(tmp_path, family, **changes))


def test_a_missing_config(tmp_path: Path) -> None:
    run_dir = shutil.copytree(DATA / "qwen3/scanned", tmp_path / "a/b/c/d/e/run")
    said = fails(3, "convert", run_dir, tmp_path / "out", "--layout", "hf")
    assert "--hf-config" in said
    assert "no config.json was found" in said
    for given in (tmp_path / "none", "./none", "a/b/c"):
        assert "does not exist" in fails(3, "convert", run_dir, tmp_path / "out", "--hf-config", given)
    assert "has no config.json" in fails(3, "convert", run_dir, tmp_path / "out", "--hf-config", tmp_path)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama3.1", "llama"),
        ("gemma2", "gemma2"),
        ("qwen3.5-moe", "qwen3_5_moe"),
        ("gemma4", "gemma4"),
        ("deepseek3", "deepseek"),
    ],
)
def test_an_ambiguous_family_without_config_names_the_option(family: str, words: str, tmp_path: Path) -> None:
    run_dir = shutil.copytree(DATA / family / "scanned", tmp_path / "a/b/c/d/e/run")
    said = fails(3, "convert", run_dir, tmp_path / "out")
    assert words in said
    assert "--hf-config" in said


# -- whatever else: no traceback


def mutations(rng: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    odd: list[Any] = [
        None, 0, -1, 1, 3, 10**9, 10**30, 1.5, float("nan"), "x", "", True, [], [1], {}, {"a": 1}, [[]], "Qwen3ForCausalLM",
    ]  # fmt: skip
    body = content.get("text_config", content) if rng.random() < 0.7 else content
    for _ in range(rng.choice([1, 1, 2, 4])):
        key = rng.choice(
            [*body, "architectures", "text_config", "layer_types", "rope_scaling", "per_layer_config", "model_type"]
        )
        body.pop(key, None) if rng.random() < 0.2 else body.update({key: rng.choice(odd)})
    return content


@pytest.mark.parametrize("seed", range(8))
def test_configs_mutated_at_random(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    families = sorted(p.parent.parent.name for p in DATA.glob("*/hf/config.json"))
    for n in range(20):
        family = rng.choice(families)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(mutations(rng, json.loads((DATA / family / "hf/config.json").read_text()))))
        scan = "scanned" if (DATA / family / "scanned").is_dir() else "unscanned"
        layout = rng.choice(["hf", "canonical"])
        if n % 2:
            code, _ = run("plan", "--hf-config", path, "--layout", layout, rng.choice(["--scanned", "--unscanned"]))
        else:
            code, _ = run("convert", DATA / family / scan, tmp_path / f"{n}", "--hf-config", path, "--layout", layout)
        assert code in {0, 3}


METADATA_FILES = ["0/items/_METADATA", "0/_CHECKPOINT_METADATA", "0/items/manifest.ocdbt"]


@pytest.mark.parametrize("seed", range(6))
def test_bytes_of_metadata_flipped_at_random(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for n in range(12):
        variant = rng.choice(["qwen3/scanned", "variants/qwen3-scanned-zarr2", "variants/qwen3-scanned-noocdbt"])
        run_dir = shutil.copytree(DATA / variant, tmp_path / f"run{n}")
        files = [run_dir / f for f in METADATA_FILES if (run_dir / f).exists()]
        files += [*run_dir.rglob("zarr.json"), *run_dir.rglob(".zarray"), *(run_dir / "0/items").glob("d/*")]
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        for _ in range(rng.choice([1, 1, 3, 20])):
            if data:
                data[rng.randrange(len(data))] = rng.choice([0, 0x22, 0x2D, 0x30, 0x39, 0x7B, 0xFF, rng.randrange(256)])
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data) + 1)]
        file.write_bytes(bytes(data))
        code, _ = run("convert", run_dir, tmp_path / f"out{n}", "--hf-config", QWEN3)
        assert code in {0, 3}
        if code:
            assert not (tmp_path / f"out{n}").exists()
        assert run("inspect", run_dir)[0] in {0, 3}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", '{"tree_metadata": []}', '{"tree_metadata": {"a": 1}}', "[" * 50_000,
                '{"tree_metadata": {"a": {"key_metadata": [], "value_metadata": {}}}}',
                '{"tree_metadata": {"a": {"key_metadata": [{"key": "../../x"}], "value_metadata": {}}}}'],
)  # fmt: skip
def test_metadata_that_are_none(copy: Path, tmp_path: Path, content: str) -> None:
    (copy / "0/items/_METADATA").write_text(content)
    said = fails(3, "convert", copy, tmp_path / "out", "--hf-config", QWEN3)
    assert str(copy / "0/items") in said


def test_paths_with_spaces_and_letters_of_the_world(tmp_path: Path) -> None:
    run_dir = shutil.copytree(DATA / "qwen3/scanned", tmp_path / "mein Lauf ü 模型 #1?%20")
    out = tmp_path / "aus gabe é"
    assert convert(str(run_dir), str(out), hf_config=QWEN3).tensors == 26
    assert run("verify", out)[0] == 0


def test_a_file_where_a_directory_is_meant_and_the_other_way_round(tmp_path: Path) -> None:
    file, run_ = tmp_path / "README.md", DATA / "qwen3" / "scanned"
    file.write_text("words")
    given = ("--hf-config", QWEN3)
    assert fails(3, "convert", run_, file, *given) == f"{file} is a file; OUT must be a directory, new or empty"
    assert f"{file} is a file, so {file}/deep cannot be made" in fails(3, "convert", run_, file / "deep", *given)
    assert fails(3, "verify", file).startswith(f"{file} is a file; give the directory of a version")
    assert fails(3, "verify", tmp_path / "none").startswith(f"{tmp_path}/none does not exist")
    assert fails(3, "batch", tmp_path).startswith(f"{tmp_path} is a directory; a file is wanted")
    version = tmp_path / "version"
    assert run("convert", run_, version, *given)[0] == 0
    assert fails(3, "fetch", version, file) == f"{file} is a file; OUT must be a directory, new or empty"
    assert file.read_text() == "words"


def test_versions_and_hugging_face_directories_are_known_for_what_they_are(tmp_path: Path) -> None:
    version = tmp_path / "root" / "3"
    assert run("convert", DATA / "qwen3" / "scanned", version, "--hf-config", QWEN3)[0] == 0
    assert f"is a version, converted already: `mtx2vllm verify {version}`" in fails(3, "inspect", version)
    assert f"is a root of versions, converted already: `mtx2vllm versions {tmp_path}/root`" in fails(
        3, "inspect", tmp_path / "root"
    )
    (model := tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    assert "is a Hugging Face model, not a MaxText checkpoint: `mtx2vllm adopt`" in fails(3, "inspect", model)


def test_a_read_only_file_system_is_told_of_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    out = tmp_path / "out"
    monkeypatch.setattr(Path, "mkdir", refuse)
    said = fails(3, "convert", DATA / "qwen3" / "scanned", out, "--hf-config", QWEN3)
    assert said.startswith(f"{out} cannot be written: its file system is read-only; give a place on another")


def test_a_budget_that_is_too_small_says_what_would_do(tmp_path: Path) -> None:
    arguments = ("convert", DATA / "qwen3" / "scanned", tmp_path / "out", "--hf-config", QWEN3, "--memory-budget")
    said = fails(3, *arguments, "1KB")
    least = int(said.removeprefix("pass --memory-budget ").split()[0])
    assert fails(3, *arguments, least - 1).startswith(f"pass --memory-budget {least} or more")
    assert run(*arguments, least)[0] == 0


@pytest.mark.parametrize("when", ["prepare", "carry_out"])
def test_an_interrupted_conversion_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        conversion if when == "prepare" else Publisher, when if when == "prepare" else "publish", interrupt
    )
    answer = CliRunner().invoke(
        main, ["convert", str(DATA / "qwen3" / "scanned"), str(tmp_path / "out"), "--hf-config", QWEN3]
    )
    assert answer.exit_code == 130
    assert answer.stderr.splitlines()[-1] == "interrupted; nothing was published"
    assert not (tmp_path / "out").exists()


def test_one_step_is_not_called_the_newest(tmp_path: Path) -> None:
    said = fails(3, "convert", DATA / "qwen3" / "scanned", tmp_path / "out", "--hf-config", QWEN3, "--step", 7)
    assert "has no committed step 7; its steps are 0" in said
