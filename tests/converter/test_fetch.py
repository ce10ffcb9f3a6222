"""Copying a version: what is sound stays, what is wrong is asked for again, nothing leaves the directory."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import versions

from mtx2vllm.converter.errors import DifferenceError, InputError, NotCommitted
from mtx2vllm.converter.storage import files
from mtx2vllm.converter.version import fetch_shard
from mtx2vllm.converter.version.fetch import fetch_version
from mtx2vllm.converter.version.fetch_shard import Piece, pieces_of, ranges
from mtx2vllm.converter.version.verify import verify_version
from mtx2vllm.schemas.manifest import Manifest

SHARDS = [f"canonical/model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return versions.write_version(tmp_path / "root" / "100", versions.arrays(0, rows=64, columns=50))


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_shard, "RANGE", 1000)


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def size_of(directory: Path) -> int:
    return sum(len(data) for name, data in content(directory).items() if name != "mtx2vllm.json")


def test_a_copy_is_the_version_and_a_second_one_fetches_nothing(version: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    first = fetch_version(f"{version}/", str(copy))
    assert content(copy) == content(version)
    assert (first.fetched, first.kept, first.files) == (size_of(version), 0, 4)
    assert verify_version(str(copy)).ok
    again = fetch_version(str(version), str(copy))
    assert (again.fetched, again.kept) == (0, size_of(version))
    assert "every digest is the manifest's" in again.sentence()


def test_only_the_config(version: Path, tmp_path: Path) -> None:
    fetch_version(str(version), str(tmp_path / "c"), config_only=True)
    assert list(content(tmp_path / "c")) == ["config.json"]
    fetch_version(str(version), str(tmp_path / "c"))
    assert content(tmp_path / "c") == content(version)


def test_an_interrupted_copy_goes_on(version: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    code = (
        "import os, sys; from mtx2vllm.converter.storage import files; from mtx2vllm.converter.version import fetch, fetch_shard\n"
        "fetch_shard.RANGE, fetch_shard.LOCAL_THREADS = 1000, 1\n"
        "count, real = [], files.FileStore.read_into\n"
        "def die(*a):\n"
        "    count.append(1); real(*a)\n"
        "    len(count) > 24 and os.kill(os.getpid(), 9)\n"
        "files.FileStore.read_into = die; fetch.fetch_version(sys.argv[1], sys.argv[2])"
    )
    assert subprocess.run([sys.executable, "-c", code, version, copy], check=False).returncode == -signal.SIGKILL
    with pytest.raises(NotCommitted):
        fetch_version(str(copy), str(tmp_path / "none"))
    rest = fetch_version(str(version), str(copy))
    assert content(copy) == content(version)
    assert rest.kept > 5000
    assert rest.fetched + rest.kept == size_of(version)


@pytest.mark.parametrize("damage", ["flip", "header", "truncate", "longer", "config", "gone"])
def test_a_copy_that_was_damaged_is_mended_by_its_digests(version: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    fetch_version(str(version), str(copy))
    shard, config = copy / SHARDS[0], copy / "config.json"
    data = bytearray(shard.read_bytes())
    mapped = np.memmap(shard, np.uint8, "r")
    if damage in {"flip", "header"}:
        data[-1 if damage == "flip" else 20] ^= 1
        with shard.open("r+b") as file:
            file.write(data)
    elif damage in {"truncate", "longer"}:
        (tmp_path / "other").write_bytes(data[:-1] if damage == "truncate" else data + b"x")
        (tmp_path / "other").replace(shard)
    elif damage == "gone":
        shard.unlink()
    else:
        config.write_bytes(b"{}")
    mended = fetch_version(str(version), str(copy))
    assert content(copy) == content(version)
    assert 0 < mended.fetched < size_of(version)
    assert len(bytes(mapped)) == len(data)


def test_bytes_that_arrive_wrong_once_are_asked_for_again(
    version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wrong = files.FileStore.read_into, []

    def once(self: Any, path: str, start: int, out: memoryview) -> None:
        real(self, path, start, out)
        if start and len(wrong) < 2:
            wrong.append(start)
            out[0] ^= 1

    monkeypatch.setattr(files.FileStore, "read_into", once)
    fetch_version(str(version), str(tmp_path / "copy"))
    assert len(wrong) == 2
    assert content(tmp_path / "copy") == content(version)


def test_a_version_that_is_damaged_itself_is_named_and_never_committed(version: Path, tmp_path: Path) -> None:
    shard = version / SHARDS[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DifferenceError, match=r"00002-of-00002.safetensors: tensor '\S+': other bytes") as caught:
        fetch_version(str(version), str(tmp_path / "copy"))
    assert caught.value.exit_status == 4
    assert not (tmp_path / "copy" / "mtx2vllm.json").exists()


def test_everything_that_is_missing_is_said_at_once(version: Path, tmp_path: Path) -> None:
    (version / SHARDS[0]).unlink()
    (version / SHARDS[1]).write_bytes(b"short")
    with pytest.raises(InputError) as caught:
        fetch_version(str(version), str(tmp_path / "copy"))
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../x", "gs://other/x", "~/x", "a\\..\\x", ".", "a//b"])
def test_no_name_in_a_manifest_leads_out_of_the_version(version: Path, tmp_path: Path, name: str) -> None:
    path = version / "mtx2vllm.json"
    listed = json.loads(path.read_text())
    listed["files"][name] = {"size": 1, "digest": versions.hexdigest(b"x"), "shard": False}
    path.write_text(json.dumps(listed))
    before = content(tmp_path)
    with pytest.raises(InputError, match="leads out of the version directory"):
        fetch_version(str(version), str(tmp_path / "copy"))
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["mtx2vllm.json", ".mtx2vllm.claim.json"])
def test_a_manifest_may_not_list_our_own_files(version: Path, tmp_path: Path, name: str) -> None:
    path = version / "mtx2vllm.json"
    listed = json.loads(path.read_text())
    listed["files"][name] = {"size": 1, "digest": versions.hexdigest(b"x"), "shard": False}
    path.write_text(json.dumps(listed))
    with pytest.raises(InputError, match="may have this name"):
        fetch_version(str(version), str(tmp_path / "copy"))


def test_links_in_the_directory_are_not_followed(version: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "canonical").symlink_to(outside)
    with pytest.raises(InputError, match="through a link"):
        fetch_version(str(version), str(tmp_path / "a"))
    (tmp_path / "b" / "canonical").mkdir(parents=True)
    target = outside / "precious"
    target.write_bytes(b"x" * (version / SHARDS[0]).stat().st_size)
    (tmp_path / "b" / SHARDS[0]).symlink_to(target)
    fetch_version(str(version), str(tmp_path / "b"))
    assert set(target.read_bytes()) == {ord("x")}
    assert content(tmp_path / "b") == content(version)


def test_another_version_and_foreign_files_are_left_alone(version: Path, tmp_path: Path) -> None:
    other = versions.write_version(tmp_path / "root" / "110", versions.arrays(1))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for directory, why in ((other, "holds another version"), (foreign, "did not write")):
        before = content(directory)
        with pytest.raises(InputError, match=why):
            fetch_version(str(version), str(directory))
        assert content(directory) == before
    with pytest.raises(InputError, match="not a local directory"):
        fetch_version(str(version), "gs://bucket/x")


def test_pieces_cover_a_shard_and_holes_are_refused(version: Path) -> None:
    manifest = Manifest.parse((version / "mtx2vllm.json").read_bytes())
    pieces = pieces_of(manifest, SHARDS[0])
    assert [p.start for p in pieces[1:]] == [p.end for p in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (0, manifest.files[SHARDS[0]].size)
    names = sorted((t.offset, key) for key, t in manifest.tensors.items() if t.file == SHARDS[0])
    for _, name in names[1:]:
        holed = manifest.model_copy(update={"tensors": {k: t for k, t in manifest.tensors.items() if k != name}})
        with pytest.raises(InputError, match="the manifest"):
            pieces_of(holed, SHARDS[0])


def test_neighbours_are_asked_for_together_and_nothing_too_long() -> None:
    pieces = [Piece("", 0, 10, ""), Piece("", 10, 12, ""), Piece("", 20, 3500, "")]
    assert ranges(pieces) == [(0, 12), (20, 1020), (1020, 2020), (2020, 3020), (3020, 3500)]
