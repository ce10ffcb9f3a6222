"""A version that nobody could load: what `versions`, `pin` and `prune` make of it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from versions import arrays, write_version

from mtx2vllm.converter.cli import main

SHARD = "canonical/model-00001-of-00002.safetensors"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def there(root: Path) -> set[int]:
    return {int(p.name) for p in root.iterdir() if p.name.isdigit()}


def unreadable(version: Path) -> str:
    (version / "mtx2vllm.json").write_text("x")
    return "is not a valid manifest"


def shardless(version: Path) -> str:
    (version / SHARD).unlink()
    return f"{SHARD} is missing"


def truncated(version: Path) -> str:
    data = (version / SHARD).read_bytes()
    (version / SHARD).write_bytes(data[:-10])
    return f"{SHARD} has {len(data) - 10} bytes where the manifest says {len(data)}"


SPOILT = pytest.mark.parametrize("spoil", [unreadable, shardless, truncated])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (2, 3, 4):
        write_version(tmp_path / str(step), arrays(step))
    return tmp_path


@SPOILT
@pytest.mark.parametrize(("keep", "left"), [(1, {3, 4}), (2, {2, 3, 4})])
def test_prune_does_not_count_it(root: Path, spoil, keep: int, left: set[int]) -> None:
    spoil(root / "4")
    before = {p: p.read_bytes() for p in (root / "4").rglob("*") if p.is_file()}
    shown = run("prune", root, "--keep", keep).stdout
    assert there(root) == left
    assert "keeps 3: newest" in shown and "keeps 4: " in shown and "not counted" in shown
    assert {p: p.read_bytes() for p in (root / "4").rglob("*") if p.is_file()} == before


def test_prune_removes_nothing_where_none_is_whole(root: Path) -> None:
    for step in (2, 3, 4):
        shardless(root / str(step))
    assert run("prune", root, "--keep", 1).exit_code == 0
    assert there(root) == {2, 3, 4}


def test_an_old_one_goes_with_the_old_ones_unless_it_cannot_be_read(root: Path) -> None:
    shardless(root / "3")
    unreadable(root / "2")
    result = run("prune", root, "--keep", 1)
    assert there(root) == {2, 4}
    assert "removed 3" in result.stdout and "keeps 2: not counted: its manifest cannot be read" in result.stdout


@SPOILT
def test_it_is_not_pinned(root: Path, spoil) -> None:
    why = spoil(root / "4")
    result = run("pin", root, 4)
    assert result.exit_code == 3 and "version 4 of" in result.stderr and "is not pinned" in result.stderr
    assert why in result.stderr and not (root / ".pin.json").exists()
    assert "it holds 3, 2" in run("pin", root, 5).stderr


@SPOILT
def test_versions_say_what_is_wrong(root: Path, spoil) -> None:
    why = spoil(root / "4")
    shown = run("versions", root).stdout
    rows = {line.split()[0]: line.rstrip() for line in shown.splitlines() if line.split()}
    assert rows["4"].endswith("unreadable" if spoil is unreadable else "incomplete")
    assert rows["3"].endswith("complete, newest")
    assert f"version 4: {'' if spoil is unreadable else 'not complete, '}" in shown and why in shown
    told = json.loads(run("versions", root, "--json").stdout)["versions"]
    assert [(v["step"], v["complete"], v["newest"]) for v in told] == [
        (4, False, False),
        (3, True, True),
        (2, True, False),
    ]
    assert why in told[0]["problem"]


def test_many_missing_shards_are_counted(root: Path) -> None:
    for shard in (root / "4" / "canonical").glob("*.safetensors"):
        shard.unlink()
    problem = json.loads(run("versions", root, "--json").stdout)["versions"][0]["problem"]
    assert problem == f"not complete, {SHARD} is missing (and 1 more file); copy or convert it again"


def test_the_hugging_face_layout(tmp_path: Path) -> None:
    write_version(tmp_path / "5", arrays(5), layout="hf")
    assert json.loads(run("versions", tmp_path, "--json").stdout)["versions"][0]["complete"]
    (tmp_path / "5" / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in run("versions", tmp_path).stdout
