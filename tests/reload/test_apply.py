"""All or nothing: what does not fit is refused whole and at once, and a fault at any tensor leaves what was there."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fake_engine import FakeEngine
from versions import BF16, arrays, write_version

from mtx2vllm.reload import load_version
from mtx2vllm.reload.apply import LoadFailed, Way, load
from mtx2vllm.reload.aspire import open_version
from mtx2vllm.reload.engine import EngineBroken
from mtx2vllm.reload.stage import Stager

A, B = arrays(1), arrays(2)
NAMES = sorted(A)


def bring(engine: FakeEngine, stager: Stager, directory: Path, loaded=None, **way):
    return load(engine, stager, open_version(str(directory), int(directory.name)), loaded, Way(**way))


def refused(engine: FakeEngine, stager: Stager, directory: Path, loaded=None) -> LoadFailed:
    """The failure; the engine must not have noticed."""
    before, calls = engine.hash(), list(engine.calls)
    with pytest.raises(LoadFailed) as caught:
        bring(engine, stager, directory, loaded)
    assert engine.hash() == before and not [c for c in engine.calls[len(calls) :] if c.startswith("swap")]
    return caught.value


@pytest.mark.parametrize("mode", ["double", "inplace"])
@pytest.mark.parametrize("k", range(len(A)))
def test_a_fault_at_any_tensor_restores_what_was_served(tmp_path: Path, stager: Stager, mode: str, k: int) -> None:
    engine = FakeEngine(A, mode)
    one, two = write_version(tmp_path / "1", A), write_version(tmp_path / "2", B)
    loaded, _ = bring(engine, stager, one)
    engine.fail_at = k
    with pytest.raises(LoadFailed, match="injected") as caught:
        bring(engine, stager, two, loaded)
    assert caught.value.reason == "swap" and engine.holds(A) and engine.version == 1
    engine.fail_at = None
    loaded, report = bring(engine, stager, two, loaded)
    assert engine.holds(B) and report.mode == mode
    bring(engine, stager, one, loaded)
    assert engine.holds(A)  # A -> B -> A


def test_a_fault_in_the_very_first_swap(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A, "inplace")
    before = engine.hash()
    engine.fail_at = 2
    with pytest.raises(LoadFailed):
        bring(engine, stager, write_version(tmp_path / "1", A))
    assert engine.hash() == before and engine.version is None


def test_a_way_back_that_fails_is_told_apart(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A, "inplace")
    engine.fail_at, engine.fail_undo = 2, True
    with pytest.raises(EngineBroken):
        bring(engine, stager, write_version(tmp_path / "1", A))


def test_undo_is_the_loaded_version_from_its_own_files(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A, "inplace")
    loaded, _ = bring(engine, stager, write_version(tmp_path / "1", A))
    assert engine.changes[-1].undo is None  # nothing to go back to
    changed = {**A, NAMES[2]: B[NAMES[2]], NAMES[4]: B[NAMES[4]]}
    loaded, _ = bring(engine, stager, write_version(tmp_path / "2", changed), loaded)
    undo = engine.changes[-1].undo
    assert undo is not None and undo.keys() == engine.changes[-1].weights.keys() == {NAMES[2], NAMES[4]}
    assert all(undo[name].tobytes() == A[name].tobytes() for name in undo)
    # The next undo comes from version 2 alone, though some of its tensors were brought by version 1.
    shutil.rmtree(tmp_path / "1")
    bring(engine, stager, write_version(tmp_path / "3", B), loaded)
    undo = engine.changes[-1].undo
    assert undo is not None and all(undo[name].tobytes() == changed[name].tobytes() for name in undo)


def test_without_the_loaded_version_the_engine_keeps_a_copy(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A, "inplace")
    loaded, _ = bring(engine, stager, write_version(tmp_path / "1", A))
    shutil.rmtree(tmp_path / "1")
    engine.fail_at = 3
    with pytest.raises(LoadFailed):
        bring(engine, stager, write_version(tmp_path / "2", B), loaded)
    assert engine.holds(A)


def test_a_damaged_loaded_version_is_no_way_back(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A, "inplace")
    loaded, _ = bring(engine, stager, write_version(tmp_path / "1", A))
    for path in (tmp_path / "1").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()
        path.write_bytes(data)
    bring(engine, stager, write_version(tmp_path / "2", B), loaded)
    assert engine.changes[-1].undo is None and engine.holds(B)


@pytest.mark.parametrize("swap", ["double", "inplace"])
def test_the_mode_that_was_asked_for(tmp_path: Path, stager: Stager, swap: str) -> None:
    engine = FakeEngine(A, "double" if swap == "inplace" else "inplace")
    bring(engine, stager, write_version(tmp_path / "1", A), swap=swap, requests="drain")
    assert engine.changes[0].mode == swap and engine.changes[0].requests == "drain"
    assert not any(call.startswith("mode_for") for call in engine.calls)


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path, stager: Stager) -> None:
    version = {**A}
    del version["model.norm.weight"]
    version["model.layers.7.mlp.down_proj.weight"] = A["model.norm.weight"]
    version["model.layers.0.mlp.down_proj.weight"] = A["model.layers.0.mlp.down_proj.weight"][:-1].copy()
    version["model.layers.1.mlp.down_proj.weight"] = A["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    error = refused(FakeEngine(A), stager, write_version(tmp_path / "1", version))
    text = str(error)
    assert error.reason == "misfit" and len(error.problems) == 3
    assert "1 tensors that the engine does not have: model.layers.7.mlp" in text
    assert "1 tensors of the engine are missing in the version: model.norm.weight" in text
    assert "layers.0.mlp.down_proj.weight is BF16 [7, 6], the engine wants BF16 [8, 6]" in text
    assert "layers.1.mlp.down_proj.weight is F32 [8, 6], the engine wants BF16 [8, 6]" in text


def test_bf16_into_an_fp8_engine_is_refused(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine({name: value.astype(ml_dtypes.float8_e4m3fn) for name, value in A.items()})
    assert "the engine wants F8_E4M3" in str(refused(engine, stager, write_version(tmp_path / "1", A)))
    error = refused(engine, stager, write_version(tmp_path / "2", A, layout="hf"))
    assert error.reason == "misfit"


def test_a_checkpoint_of_another_size(tmp_path: Path, stager: Stager) -> None:
    error = refused(FakeEngine(A), stager, write_version(tmp_path / "1", arrays(1, layers=9, columns=12)))
    assert "14 tensors that the engine does not have" in str(error) and "and 6 more" in str(error)


def prefixed(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {prefix + name: value for name, value in tensors.items()}


@pytest.mark.parametrize("ours", ["", "language_model."])
@pytest.mark.parametrize("theirs", ["", "language_model."])
def test_either_prefix(tmp_path: Path, stager: Stager, ours: str, theirs: str) -> None:
    engine = FakeEngine(prefixed(A, theirs))
    bring(engine, stager, write_version(tmp_path / "1", prefixed(A, ours)))
    assert engine.holds(prefixed(A, theirs))


def test_the_experts_module_has_two_names(tmp_path: Path, stager: Stager) -> None:
    new = {"model.layers.0.mlp.experts.routed_experts.w13_weight": np.ones((2, 4, 3), BF16)}
    old = {"model.layers.0.mlp.experts.w13_weight": np.ones((2, 4, 3), BF16)}
    for holds, brings in ((new, old), (old, new)):
        engine = FakeEngine(holds)
        bring(engine, stager, write_version(tmp_path / str(len(list(tmp_path.iterdir()))), brings, shards=1))
        assert engine.holds(holds)


def test_a_tied_engine(tmp_path: Path, stager: Stager) -> None:
    tied = {**A, "lm_head.weight": A["model.embed_tokens.weight"]}
    engine = FakeEngine(A)
    bring(engine, stager, write_version(tmp_path / "1", tied, layout="hf"))
    assert engine.holds(A)
    untied = {**A, "lm_head.weight": B["model.embed_tokens.weight"]}
    error = refused(engine, stager, write_version(tmp_path / "2", untied, layout="hf"))
    assert "ties its output head" in str(error)


def test_vision_stays_untouched_and_is_named(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A)
    whole = {**A, "model.visual.patch.weight": np.ones((2, 2), BF16)}
    _, report = bring(engine, stager, write_version(tmp_path / "1", whole, layout="hf"))
    assert engine.holds(A) and report.ignored == ("model.visual.patch.weight",)
    assert "does not have" in str(refused(engine, stager, write_version(tmp_path / "2", whole)))


def rewrite(directory: Path, change) -> None:
    path = directory / "mtx2vllm.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


SHARD = "canonical/model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("damage", "reason", "said"),
    [
        (lambda d: (d / SHARD).unlink(), "vanished", "model-00001-of-00002.safetensors is not there"),
        (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-1]), "invalid", "truncated"),
        (lambda d: (d / SHARD).write_bytes(b""), "invalid", "truncated"),
        (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes() + b"x"), "invalid", "changed after publication"),
        (lambda d: flip(d / SHARD, 20), "invalid", "header"),
        (lambda d: flip(d / SHARD, -1), "invalid", "another digest"),
        (lambda d: rewrite(d, lambda m: m.update(layout="hf")), "invalid", "layout"),
        (lambda d: rewrite(d, lambda m: m["tensors"][NAMES[0]].update(blake3="0" * 64)), "invalid", NAMES[0]),
    ],
)
def test_damaged_versions(tmp_path: Path, stager: Stager, damage, reason: str, said: str) -> None:
    engine = FakeEngine(A)
    loaded, _ = bring(engine, stager, write_version(tmp_path / "1", B))
    damage(write_version(tmp_path / "2", A))
    error = refused(engine, stager, tmp_path / "2", loaded)
    assert error.reason == reason and said in str(error)
    assert engine.holds(B)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_published_anew_while_it_is_staged(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A)
    version = open_version(str(write_version(tmp_path / "1", A)), 1)
    write_version(tmp_path / "1", B)
    with pytest.raises(LoadFailed) as caught:
        load(engine, stager, version, None, Way())
    assert caught.value.reason == "changed" and engine.changes == []


def test_written_to_between_staging_and_swap(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A)
    directory = write_version(tmp_path / "1", A)
    mode_for = engine.mode_for

    def write_then(nbytes: int) -> str:  # called after staging
        flip(directory / SHARD, -1)
        return mode_for(nbytes)

    engine.mode_for = write_then
    with pytest.raises(LoadFailed, match="was written to after it was staged"):
        bring(engine, stager, directory)
    assert engine.changes == []


def test_given_up_while_staging(tmp_path: Path, stager: Stager) -> None:
    engine = FakeEngine(A)
    directory = write_version(tmp_path / "1", A)
    with pytest.raises(LoadFailed) as caught:
        bring(engine, stager, directory, cancelled=lambda: True)
    assert caught.value.reason == "cancelled" and engine.changes == []


def test_load_version_without_a_thread(tmp_path: Path) -> None:
    engine = FakeEngine(A)
    report = load_version(engine, write_version(tmp_path / "42", A))
    assert engine.holds(A) and engine.version == report.version == 42
    rewrite(write_version(tmp_path / "named", B), lambda m: m["source"].update(step=7))
    assert load_version(engine, str(tmp_path / "named"), swap="inplace").version == 7
    assert engine.holds(B)


def test_phases_are_separate(tmp_path: Path, stager: Stager) -> None:
    _, report = bring(FakeEngine(A), stager, write_version(tmp_path / "1", A))
    assert list(report.seconds) == ["verify", "stage", "prepare", "pause", "resume"]
    assert all(value >= 0 for value in report.seconds.values()) and report.nbytes == sum(v.nbytes for v in A.values())


def test_the_screen_refuses_nan(tmp_path: Path) -> None:
    sick = {**A, "model.norm.weight": np.where(np.arange(48).reshape(8, 6) == 47, np.nan, 1).astype(BF16)}
    engine = FakeEngine(A)
    directory = write_version(tmp_path / "1", sick)
    with pytest.raises(LoadFailed, match=r"model\.norm\.weight holds NaN or infinity"):
        load_version(engine, str(directory), screen=True)
    load_version(engine, str(directory))
    assert engine.holds(sick)
    load_version(engine, str(write_version(tmp_path / "2", A)), screen=True)
    assert engine.holds(A)
