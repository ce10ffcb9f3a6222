"""What a checkpoint is, read from metadata: wrappers, storages, steps, on a disk and where a marker is the commit."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import pytest
from data_files import DATA, raw_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from make_run import read_step, write_step

from mtx2vllm.converter import locate as locating
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError, NotCommitted
from mtx2vllm.converter.locate import locate, steps
from mtx2vllm.converter.source import normalize, open_checkpoint, open_leaf
from mtx2vllm.converter.storage import Stat
from mtx2vllm.converter.storage.files import FileStore


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("params.params.decoder.layers.mlp.wo.kernel", "decoder.layers.mlp.wo.kernel"),
        ("params.MoEBiasVar.decoder.moe_layers.gate.bias", "decoder.moe_layers.gate.bias"),
        ("decoder.layers.mlp.wo.kernel.value", "decoder.layers.mlp.wo.kernel"),
        ("base.decoder.layers.mlp.wo.kernel.value", "decoder.layers.mlp.wo.kernel"),
        ("decoder.layers.0.mlp.wo.kernel.value", "decoder.layers_0.mlp.wo.kernel"),
        ("base.decoder.layers.12.mlp.wo.kernel", "decoder.layers_12.mlp.wo.kernel"),
        ("params.params.token_embedder.embedding", "token_embedder.embedding"),
    ],
)
def test_wrappers_are_stripped(key: str, path: str) -> None:
    assert normalize(tuple(key.split("."))) == path


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["params", "base", "value", "decoder", "0", "17", "kernel", "layers"]), min_size=1, max_size=8
    )
)
def test_a_normalized_key_is_normal(key: list[str]) -> None:
    once = normalize(tuple(key))
    if once and not once.endswith("value"):
        assert normalize(tuple(once.split("."))) == once


@pytest.mark.parametrize(
    ("where", "storage"),
    [
        ("qwen3/scanned", ("zarr3", True)), ("variants/qwen3-scanned-zarr2", ("zarr", True)),
        ("variants/qwen3-scanned-noocdbt", ("zarr", False)), ("trained/qwen3-scanned", ("zarr3", True)),
        ("param_only/qwen3-scanned", ("zarr3", True)), ("nnx_rl/qwen3-scanned", ("zarr3", True)),
    ],
)  # fmt: skip
def test_leaves_are_what_the_checkpoint_holds(where: str, storage: tuple[str, bool]) -> None:
    """Against every array read by TensorStore under its own key."""
    found = open_checkpoint(str(DATA / where))
    assert (found.zarr, found.ocdbt) == storage
    step = Path(found.items).parent
    for leaf in found.leaves.values():
        store = open_leaf(found, leaf)
        assert store.shape == leaf.shape
        assert store.dtype.numpy_dtype.name == leaf.dtype
        assert all(0 < c <= max(n, 1) or c >= n for c, n in zip(leaf.chunks, leaf.shape, strict=True))
    if where in {"qwen3/scanned", "nnx_rl/qwen3-scanned"}:
        values = read_step(step)
        for leaf in found.leaves.values():
            assert open_leaf(found, leaf).read().result().tobytes() == values[leaf.key].tobytes()
    assert "decoder.layers.mlp.wo.kernel" in found.leaves
    assert not any("opt_state" in path or "rngs" in path or "nnx_aux" in path for path in found.leaves)


def test_what_is_no_weight_is_dropped_with_a_reason() -> None:
    found = open_checkpoint(str(DATA / "trained/qwen3-scanned"))
    reasons = {drop.path: drop.reason for drop in found.drops}
    assert "optimizer" in reasons["opt_state"]
    assert "step counter" in reasons["step"]
    kept = {leaf.key for leaf in found.leaves.values()}
    everything = json.loads((Path(found.items) / "_METADATA").read_text())["tree_metadata"].values()
    keys = {
        tuple(str(k["key"]) for k in e["key_metadata"])
        for e in everything
        if not e["value_metadata"]["skip_deserialize"]
    }
    for key in keys:  # every array of the tree is kept or named
        assert ".".join(key) in kept or key[0] in reasons or ".".join(key) in reasons


def test_the_optimizers_data_are_never_touched(tmp_path: Path) -> None:
    """A tree whose optimizer state has no data at all converts as well: nothing of it is opened."""
    values = read_step(DATA / "qwen3/scanned/0")
    step = write_step(tmp_path / "0", values)
    metadata = json.loads((step / "items/_METADATA").read_text())
    for moment in ("mu", "nu"):
        parts = ["opt_state", "0", moment, "params", "decoder", "layers", "mlp", "wo", "kernel"]
        metadata["tree_metadata"][str(tuple(parts))] = {
            "key_metadata": [{"key": p, "key_type": 2} for p in parts],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    (step / "items/_METADATA").write_text(json.dumps(metadata))
    convert(str(step), str(tmp_path / "out"), hf_config=str(DATA / "qwen3/hf"), layout="hf")
    assert raw_tensors(tmp_path / "out") == raw_tensors(DATA / "qwen3/hf")


@pytest.mark.parametrize("wrapper", ["linen", "nnx", "rl", "list"])
@pytest.mark.parametrize("zarr3", [True, False])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_every_wrapper_in_every_storage(tmp_path: Path, wrapper: str, zarr3: bool, ocdbt: bool) -> None:
    def renamed(key: str) -> str:
        bare = key.removeprefix("params.params.")
        if wrapper == "list":  # NNX lists have numbers for names
            return bare.replace("decoder.layers_", "decoder.layers.") + ".value"
        return {"linen": f"params.params.{bare}", "nnx": f"{bare}.value", "rl": f"base.{bare}.value"}[wrapper]

    scan = "unscanned" if wrapper == "list" else "scanned"
    values = {renamed(k): v for k, v in read_step(DATA / "qwen3" / scan / "0").items() if k != "step"}
    step = write_step(tmp_path / "run" / "4", values, zarr3=zarr3, ocdbt=ocdbt)
    done = convert(str(step.parent), str(tmp_path / "out"), hf_config=str(DATA / "qwen3/hf"), layout="hf")
    assert done.step == 4
    assert raw_tensors(tmp_path / "out") == raw_tensors(DATA / "qwen3/hf")


@pytest.mark.parametrize("scan", ["scanned", "unscanned"])
@pytest.mark.parametrize("said", [{"scan_layers": True}, {"scan_layers": False}, {}, {"scan_layers": "?"}])
def test_scanned_or_not_is_told_by_the_tree_whatever_the_metadata_say(
    tmp_path: Path, scan: str, said: dict[str, Any]
) -> None:
    step = write_step(tmp_path / "0", read_step(DATA / "qwen3" / scan / "0"), custom=said)
    convert(str(step), str(tmp_path / "out"), hf_config=str(DATA / "qwen3/hf"), layout="hf")
    assert raw_tensors(tmp_path / "out") == raw_tensors(DATA / "qwen3/hf")


def test_chunks_of_any_shape_hold_the_same(tmp_path: Path) -> None:
    values = read_step(DATA / "qwen3/scanned/0")
    for n, cut in enumerate((1, 7, 13)):
        chunks = {
            k: tuple(min(s, cut if i != 1 or cut == 1 else s) for i, s in enumerate(v.shape)) for k, v in values.items()
        }
        chunks["params.params.token_embedder.embedding"] = (256, 64)
        step = write_step(tmp_path / str(n), values, chunks=chunks, ocdbt=False)
        convert(str(step), str(tmp_path / f"out{n}"), hf_config=str(DATA / "qwen3/hf"), layout="hf")
        assert raw_tensors(tmp_path / f"out{n}") == raw_tensors(DATA / "qwen3/hf")


def test_an_old_deepseek_bias_among_the_parameters(tmp_path: Path) -> None:
    """Its layer axis is second there. As many layers as experts (a square) must not hide it."""
    values = read_step(DATA / "deepseek3/scanned/0")
    [key] = [k for k in values if "MoEBiasVar" in k]
    assert key.startswith("params.MoEBiasVar.")
    values[key.replace("params.MoEBiasVar", "params.params")] = np.ascontiguousarray(values.pop(key).T)
    step = write_step(tmp_path / "0", values)
    convert(str(step), str(tmp_path / "out"), hf_config=str(DATA / "deepseek3/hf"), layout="hf")
    assert raw_tensors(tmp_path / "out") == raw_tensors(DATA / "deepseek3/hf")


@pytest.mark.parametrize("old", [True, False])
def test_as_many_experts_as_layers(tmp_path: Path, old: bool) -> None:
    config = json.loads((DATA / "deepseek3/hf/config.json").read_text())
    layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    experts, groups = config["n_routed_experts"], config["n_group"]
    values = read_step(DATA / "deepseek3/scanned/0")
    cut = {}
    for key, value in values.items():
        if "MoeBlock_0" in key and "shared" not in key:
            axis = value.shape.index(experts) if "bias" not in key else list(value.shape).index(experts)
            value = value.take(range(layers), axis)  # noqa: PLW2901
        cut[key] = value
    [key] = [k for k in cut if "MoEBiasVar" in k]
    assert cut[key].shape == (layers, layers)
    expected = cut[key].copy()
    if old:
        cut[key.replace("params.MoEBiasVar", "params.params")] = np.ascontiguousarray(cut.pop(key).T)
    config |= {"n_routed_experts": layers, "n_group": 1 if layers % groups else groups}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(
        str(write_step(tmp_path / "0", cut)),
        str(tmp_path / "out"),
        hf_config=str(tmp_path / "config.json"),
        layout="hf",
    )
    from data_files import arrays

    written = arrays(tmp_path / "out")
    for n in range(layers):
        name = f"model.layers.{config['first_k_dense_replace'] + n}.mlp.gate.e_score_correction_bias"
        np.testing.assert_array_equal(written[name].astype(np.float32), expected[n].astype(np.float32))


# -- where the commit is a marker, not a name: a store that says it is remote


class Remote(FileStore):
    """Local files that behave as a bucket does for whoever asks where the commit is."""

    def local(self, path: str) -> str | None:
        del path
        return None


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(locating, "store_for", lambda _: Remote())
    return


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10):
        shutil.copytree(DATA / "qwen3/scanned/0", tmp_path / "run" / str(step))
    return tmp_path / "run"


@pytest.mark.usefixtures("remote")
def test_in_a_bucket_the_marker_is_the_commit(run: Path) -> None:
    assert steps(str(run)) == [9, 10]
    for marker in (run / "10").rglob("commit_success.txt"):
        marker.unlink()
    assert steps(str(run)) == [9]
    assert locate(str(run))[1] == 9
    assert steps(str(run), allow_uncommitted=True) == [9, 10]
    assert locate(str(run), allow_uncommitted=True)[1] == 10
    for where in (run / "10", run / "10/items"):
        with pytest.raises(NotCommitted, match=r"lacks commit_success.txt.*--allow-uncommitted"):
            locate(str(where))
        assert locate(str(where), allow_uncommitted=True)[1] == 10


@pytest.mark.usefixtures("remote")
def test_a_bucket_without_any_marker_says_which_file_is_missing(run: Path) -> None:
    for marker in run.rglob("commit_success.txt"):
        marker.unlink()
    with pytest.raises(InputError, match=r"10, 9 lack commit_success.txt.*--allow-uncommitted"):
        locate(str(run))
    assert [p.name for p in sorted(run.iterdir())] == ["10", "9"], "nothing is ever deleted"


def test_flat_steps_without_an_items_directory(tmp_path: Path) -> None:
    shutil.copytree(DATA / "qwen3/scanned/0/items", tmp_path / "run" / "6")
    for where in (tmp_path / "run", tmp_path / "run/6"):
        assert open_checkpoint(str(where)).step == 6


def test_a_symlink_is_as_good(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(DATA / "qwen3/scanned")
    assert open_checkpoint(str(tmp_path / "link")).step == 0


def test_a_step_that_vanishes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's garbage collection deletes it between the look and the reading."""
    run = shutil.copytree(DATA / "qwen3/scanned", tmp_path / "run")
    real = FileStore.stat

    def stat(self: FileStore, path: str) -> Stat | None:
        found = real(self, path)
        if found and path.endswith("items/_METADATA"):
            shutil.rmtree(run / "0", ignore_errors=True)
        return found

    monkeypatch.setattr(FileStore, "stat", stat)
    with pytest.raises(InputError, match="_METADATA cannot be read"):
        open_checkpoint(str(run))


def test_leaves_have_the_widths_of_the_file(tmp_path: Path) -> None:
    kinds: list[Any] = ["bfloat16", "float32", "float16"]
    values = {f"params.params.decoder.a{n}.kernel": np.ones((3, 2), kind) for n, kind in enumerate(kinds)}
    found = open_checkpoint(str(write_step(tmp_path / "1", values)))
    assert [leaf.dtype for _, leaf in sorted(found.leaves.items())] == kinds
    assert {leaf.nbytes for leaf in found.leaves.values()} == {12, 24}
