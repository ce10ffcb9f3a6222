"""A version appears whole or not at all, and what stood there before is not lost: races, kills, full disks, leases."""

import errno
import json
import mmap
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from data_files import DATA, arrays, raw_tensors
from safetensors import safe_open

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.errors import InputError, LostRace, Mtx2vllmError, StorageError
from mtx2vllm.converter.storage import posix, store_for
from mtx2vllm.converter.version import claim, process
from mtx2vllm.converter.version.adopt import adopt
from mtx2vllm.converter.version.fetch import fetch_version
from mtx2vllm.converter.version.verify import verify_version
from mtx2vllm.schemas.manifest import Manifest

RUN, CONFIG = str(DATA / "qwen3" / "scanned"), str(DATA / "qwen3" / "hf")
KW: dict[str, Any] = {"hf_config": CONFIG}


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def sound(directory: Path) -> bool:
    """Whether the directory is a version, with nothing beside what its manifest lists."""
    found = verify_version(str(directory))
    names = {"mtx2vllm.json", *Manifest.parse((directory / "mtx2vllm.json").read_bytes()).files}
    return found.ok and content(directory).keys() == names


# -- what is written


def test_the_hf_layout_holds_what_others_look_for(tmp_path: Path) -> None:
    source = shutil.copytree(DATA / "qwen3/hf", tmp_path / "hf")
    shutil.copytree(DATA / "tokenizer", source, dirs_exist_ok=True)
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "modeling_evil.py").write_text("raise SystemExit")
    out = tmp_path / "out"
    convert(RUN, str(out), hf_config=str(source), layout="hf", max_shard_size=50_000)
    shards = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    written = arrays(out)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in written.values())
    assert index["weight_map"].keys() == written.keys()
    for name in shards:
        with safe_open(out / name, "np") as file:
            metadata = file.metadata()
            assert all(index["weight_map"][key] == name for key in file.keys())  # noqa: SIM118
        assert metadata["format"] == "pt"
        assert metadata["layout"] == "hf"
        large = [a.nbytes for key, a in written.items() if index["weight_map"][key] == name]
        assert sum(large) <= 50_000 or len(large) == 1
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "modeling_evil.py").exists()
    manifest = Manifest.parse((out / "mtx2vllm.json").read_bytes())
    assert (manifest.layout, manifest.family, manifest.architecture) == ("hf", "qwen3", "Qwen3ForCausalLM")
    assert manifest.source.step == 0
    assert sound(out)


def test_a_stock_loader_finds_no_weights_in_a_canonical_version(tmp_path: Path) -> None:
    convert(RUN, str(tmp_path), **KW)
    assert {p.name for p in tmp_path.iterdir()} == {"canonical", "config.json", "mtx2vllm.json"}
    with safe_open(tmp_path / "canonical/model.safetensors", "np") as file:
        assert file.metadata()["layout"] == "canonical"


def test_config_json_says_what_was_written(tmp_path: Path) -> None:
    config = json.loads((DATA / "qwen3/hf/config.json").read_text())
    config |= {"torch_dtype": "float16", "quantization_config": {"bits": 4}, "auto_map": {"AutoConfig": "evil.Config"}}
    given = tmp_path / "given.json"
    given.write_text(json.dumps(config))
    done = convert(RUN, str(tmp_path / "out"), hf_config=str(given), layout="hf", dtype="float32")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["dtype"] == "float32"
    assert not written.keys() & {"torch_dtype", "quantization_config", "auto_map"}
    said = "\n".join(done.notes)
    assert "quantization_config removed" in said
    assert "auto_map removed" in said
    assert "dtype: float32" in said


def test_two_conversions_write_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        convert(
            RUN,
            str(tmp_path / name),
            **KW,
            workers=3 if name == "a" else 1,
            memory_budget=(1 << 20) if name == "a" else 1 << 28,
        )
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    a.pop("mtx2vllm.json"), b.pop("mtx2vllm.json")
    assert a == b


# -- what is there already


def test_a_finished_version_is_not_overwritten_unasked(tmp_path: Path) -> None:
    convert(RUN, str(tmp_path / "out"), **KW)
    before = content(tmp_path / "out")
    with pytest.raises(InputError, match=r"finished version already \(canonical of .*qwen3/scanned.*--overwrite"):
        convert(RUN, str(tmp_path / "out"), **KW, layout="hf")
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize(("first", "second"), [(20_000, 1 << 30), (1 << 30, 20_000), (20_000, 60_000)])
@pytest.mark.parametrize("layouts", [("hf", "hf"), ("canonical", "hf"), ("hf", "canonical")])
def test_no_old_shard_stays_beside_new_ones(tmp_path: Path, first: int, second: int, layouts: tuple[str, str]) -> None:
    out = tmp_path / "out"
    convert(RUN, str(out), **KW, max_shard_size=first, layout=layouts[0])
    convert(RUN, str(out), **KW, max_shard_size=second, layout=layouts[1], overwrite=True)
    assert sound(out)
    assert (out / "canonical").exists() == (layouts[1] == "canonical")
    fresh = tmp_path / "fresh"
    convert(RUN, str(fresh), **KW, max_shard_size=second, layout=layouts[1])
    assert content(out).keys() == content(fresh).keys()


def test_a_mapped_version_keeps_its_bytes_when_it_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(RUN, str(out), **KW)
    shard = out / "canonical/model.safetensors"
    with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = bytes(mapped)
        convert(RUN, str(out), **KW, dtype="float32", overwrite=True)
        assert bytes(mapped) == before
    assert shard.read_bytes() != before


@pytest.mark.parametrize(
    "name", ["thesis.pdf", "model.safetensors", "canonical/notes.txt", "model-00003-of-00007.safetensors"]
)
@pytest.mark.parametrize("committed", [False, True])
def test_foreign_files_stop_us_and_stay(tmp_path: Path, name: str, committed: bool) -> None:
    out = tmp_path / "out"
    if committed:
        convert(RUN, str(out), **KW)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = content(out)
    with pytest.raises(InputError, match=re.escape(name)):
        convert(RUN, str(out), **KW, layout="hf", max_shard_size=90_000, overwrite=True)
    assert content(out) == before


def test_an_adopted_directory_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(RUN, str(out), **KW, layout="hf")
    manifest = json.loads((out / "mtx2vllm.json").read_text())
    manifest["source"]["kind"] = "hf"
    (out / "mtx2vllm.json").write_text(json.dumps(manifest))
    before = content(out)
    with pytest.raises(InputError, match="adopted"):
        convert(RUN, str(out), **KW, overwrite=True)
    assert content(out) == before


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\x00", b'{"format": 99}'])
def test_a_manifest_that_nobody_understands_is_left_alone(tmp_path: Path, damage: bytes) -> None:
    out = tmp_path / "out"
    convert(RUN, str(out), **KW)
    (out / "mtx2vllm.json").write_bytes(damage)
    before = content(out)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(InputError, match=r"manifest|finished"):
            convert(RUN, str(out), **KW, **options)
    assert content(out) == before


def lease(root: Path, loaded: int, heartbeat: float) -> None:
    (root / ".agents").mkdir(exist_ok=True)
    record = {"replica": "sampler-7", "loaded": loaded, "state": "serving", "heartbeat": heartbeat, "ttl_s": 120}
    path = root / ".agents/sampler-7.json"
    path.write_text(json.dumps(record))
    os.utime(path, (heartbeat, heartbeat))


def test_a_version_that_is_served_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "100"
    convert(RUN, str(out), **KW)
    lease(tmp_path, 100, time.time())
    before = content(out)
    with pytest.raises(InputError, match="being served by sampler-7"):
        convert(RUN, str(out), **KW, overwrite=True)
    assert content(out) == before
    lease(tmp_path, 100, time.time() - 1000)
    convert(RUN, str(out), **KW, overwrite=True, layout="hf")
    lease(tmp_path, 90, time.time())
    convert(RUN, str(out), **KW, overwrite=True)
    assert sound(out)


# -- places that cannot be


def test_out_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="out is a file; OUT must be a directory"):
        convert(RUN, str(tmp_path / "out"), **KW)
    assert (tmp_path / "out").read_text() == "mine"


def test_out_cannot_be_written() -> None:
    with pytest.raises(StorageError, match="/proc/sys/out"):
        convert(RUN, "/proc/sys/out", **KW)


def test_nothing_is_written_into_the_trainers_directories(tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    before = content(run)
    (tmp_path / "link").symlink_to(run)
    for out in (run / "0", run / "0/items", run / "0/items/out", run / "0/out", tmp_path / "link/0/out"):
        with pytest.raises(InputError, match="inside the checkpoint"):
            convert(str(run), str(out), **KW)
    with pytest.raises(InputError, match="beside step 0"):
        convert(str(run), str(run / "100"), **KW)
    assert content(run) == before
    convert(str(run), str(run / "served"), **KW)


# -- full disks


LIMITED = """
import resource, signal, sys
from mtx2vllm.converter.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
main(sys.argv[2:])
"""


@pytest.mark.parametrize("limit", [1000, 30_000, 200_000])
def test_a_file_that_may_not_grow(tmp_path: Path, limit: int) -> None:
    out = tmp_path / "out"
    convert(RUN, str(out), **KW, layout="hf")
    before = content(out)
    for name, more in (("out", ["--overwrite"]), ("new", [])):
        arguments = ["convert", RUN, str(tmp_path / name), "--hf-config", CONFIG, *more]
        ended = subprocess.run(
            [sys.executable, "-c", LIMITED, str(limit), *arguments], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 1, ended.stderr
        said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert len(said) == 1
        assert "too large" in said[0]
    assert content(out) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_is_full_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    """ENOSPC from the k-th thing that takes space, for every k: one sentence, no half version, no debris."""
    calls, failing = 0, 0

    def counted(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(os, "pwrite", counted(os.pwrite))
    monkeypatch.setattr(posix, "allocate", counted(posix.allocate))
    out = tmp_path / "out"
    outcomes = []
    for k in [*range(1, 6), *range(6, 200, 3)]:
        calls, failing = 0, 0
        shutil.rmtree(out, ignore_errors=True)
        if overwrite:
            convert(RUN, str(out), **KW, layout="hf")
        before, calls, failing = content(out), 0, k
        try:
            convert(RUN, str(out), **KW, max_shard_size=120_000, overwrite=overwrite)
        except Mtx2vllmError as error:
            assert error.exit_status == 1, error
            assert "the disk is full" in str(error)
            failing = 0
            left = content(out)
            outcomes.append("old" if left == before else "nothing")
            assert left in (before, {})
            convert(RUN, str(out), **KW, overwrite=overwrite)
        else:
            if calls < k:
                break
        assert sound(out)
    assert len(outcomes) > 8
    assert sound(out)
    if overwrite:  # only the last steps, after every byte was written, can cost the old version
        assert outcomes == sorted(outcomes, reverse=True)
        assert outcomes.count("old") > len(outcomes) // 3


# -- kills


KILLED = """
import os, sys
from pathlib import Path
from mtx2vllm.converter.version import publish
from mtx2vllm.converter import source  # everything is imported before the first fork
from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.storage.files import FileStore
import tensorstore

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
            os._exit(3)
    return os.waitpid(pid, 0)[1]

run, config, root, overwrite = sys.argv[1:4] + [sys.argv[4] == "1"]
for k in [*range(1, 5), *range(5, 300, 4)]:
    out = f"{root}/{k}"
    def first():
        convert(run, out, hf_config=config, layout="hf")
    if overwrite and child(first) != 0:
        sys.exit("no first version")
    def killed(k=k):
        left = [k]
        def dying(real):
            def call(*a, **kw):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), 9)
                return real(*a, **kw)
            return call
        os.fsync, os.pwrite = dying(os.fsync), dying(os.pwrite)
        Path.unlink, Path.replace = dying(Path.unlink), dying(Path.replace)
        convert(run, out, hf_config=config, max_shard_size=120_000, overwrite=overwrite)
    status = child(killed)
    print(k, status, flush=True)
    if status == 0:
        break
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_any_moment_and_run_again(tmp_path: Path, overwrite: bool) -> None:
    """SIGKILL at the k-th write, sync, rename or deletion, for every k. What is left is the old version, the new one, or
    something that every reader refuses; and the next run makes it right."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, RUN, CONFIG, str(tmp_path), str(int(overwrite))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    statuses = dict(tuple(map(int, line.split())) for line in ended.stdout.splitlines())
    assert set(statuses.values()) == {0, 9}
    assert len(statuses) > 8
    kinds = set()
    for k in statuses:
        out = tmp_path / str(k)
        if (out / "mtx2vllm.json").exists():
            kinds.add(Manifest.parse((out / "mtx2vllm.json").read_bytes()).layout)
            assert verify_version(str(out)).ok
        else:
            kinds.add("refused")
            with pytest.raises(InputError, match="not a version"):
                verify_version(str(out))
        finished = kinds and (out / "mtx2vllm.json").exists()
        convert(RUN, str(out), **KW, overwrite=bool(finished))
        assert sound(out)
    assert kinds == {"hf", "canonical", "refused"} if overwrite else kinds == {"canonical", "refused"}


# -- races


def test_of_racing_converters_exactly_one_wins(tmp_path: Path) -> None:
    for turn in range(2):
        out = tmp_path / str(turn)
        command = [sys.executable, "-m", "mtx2vllm.converter.cli", "convert", RUN, str(out), "--hf-config", CONFIG]
        code = "import sys; from mtx2vllm.converter.cli import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, *command[3:]]
        runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        said = [run.communicate()[1] for run in runs]
        assert sorted(run.returncode for run in runs) == [0, 3, 3], said
        for run, text in zip(runs, said, strict=True):
            if run.returncode:
                assert re.search(
                    r"being written by process \d+ on |finished version already \(canonical of|released by", text
                )
        assert sound(out)


def record(host: str, pid: int, heartbeat: float, files: tuple[str, ...] = (), started: int = 0) -> bytes:
    made = claim.Record(
        host=host, pid=pid, started=started, namespace=process.namespace(), heartbeat=heartbeat, files=files
    )
    return made.model_dump_json().encode()


def leave(out: Path, data: bytes, modified: float) -> None:
    out.mkdir()
    (out / claim.NAME).write_bytes(data)
    os.utime(out / claim.NAME, (modified, modified))


def test_a_live_writer_elsewhere_is_named(tmp_path: Path) -> None:
    leave(tmp_path / "out", record("node-12", 4711, time.time()), time.time())
    with pytest.raises(LostRace, match="being written by process 4711 on node-12"):
        convert(RUN, str(tmp_path / "out"), **KW)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [claim.NAME]


@pytest.mark.parametrize("host", ["node-12", socket.gethostname()])
def test_a_dead_writers_debris_goes(tmp_path: Path, host: str) -> None:
    old = time.time() - 1000
    leave(tmp_path / "out", record(host, 4711, old, ("canonical/model-00007-of-00009.safetensors", "../../x")), old)
    (tmp_path / "out/canonical").mkdir()
    (tmp_path / "out/canonical/model-00007-of-00009.safetensors").write_bytes(b"half")
    (tmp_path / "out/.mtx2vllm-half").write_bytes(b"half")
    (tmp_path / "x").write_text("mine")
    convert(RUN, str(tmp_path / "out"), **KW)
    assert sound(tmp_path / "out")
    assert (tmp_path / "x").read_text() == "mine"


def test_a_process_number_that_came_back_is_another_process(tmp_path: Path) -> None:
    old = time.time()
    started = process.started(os.getpid()) - 1
    leave(tmp_path / "out", record(socket.gethostname(), os.getpid(), old, started=started), old)
    convert(RUN, str(tmp_path / "out"), **KW)
    assert sound(tmp_path / "out")


@pytest.mark.parametrize("data", [b"", b'{"host": "node'])
def test_a_claim_that_is_being_written_counts_until_it_is_old(tmp_path: Path, data: bytes) -> None:
    leave(tmp_path / "out", data, time.time())
    with pytest.raises(LostRace, match="is being written"):
        convert(RUN, str(tmp_path / "out"), **KW)
    os.utime(tmp_path / "out" / claim.NAME, (0, 0))
    convert(RUN, str(tmp_path / "out"), **KW)
    assert sound(tmp_path / "out")


def test_a_writer_whose_claim_was_taken_over_publishes_and_deletes_nothing(tmp_path: Path) -> None:
    """It slept for too long (a suspended machine), and another run took the directory over meanwhile."""
    out, resumed = tmp_path / "out", threading.Event()
    store = store_for(str(out))

    def progress(_done: int, _total: int) -> None:
        if not resumed.is_set():
            resumed.set()
            store.replace(str(out / claim.NAME), record("node-2", 1, time.time()))
            (out / "theirs.json").write_text("{}")

    with pytest.raises(LostRace, match="taken over by another writer by process 1 on node-2"):
        convert(RUN, str(out), **KW, progress=progress)
    assert resumed.is_set()
    assert b"node-2" in (out / claim.NAME).read_bytes()
    assert (out / "theirs.json").exists()
    assert not (out / "mtx2vllm.json").exists()
    assert not list(out.rglob("*.safetensors"))


def test_the_limits_of_this_process_are_as_they_were() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] in {resource.RLIM_INFINITY, 2**63 - 1}


def test_conversion_is_the_same_with_any_shard_size(tmp_path: Path) -> None:
    for n, limit in enumerate((1, 4096, 50_000, 1 << 30)):
        convert(RUN, str(tmp_path / str(n)), **KW, layout="hf", max_shard_size=limit)
        assert raw_tensors(tmp_path / str(n)) == raw_tensors(DATA / "qwen3/hf")
        assert sound(tmp_path / str(n))


def test_a_refused_run_leaves_a_writer_below_alone(tmp_path: Path) -> None:
    """OUT was given without its last part: what another writer has in hand there is not a leftover of ours."""
    store = store_for(str(tmp_path))
    for out in ("root/110", "root/120"):
        with claim.Claim(str(tmp_path / out)):
            writer = store.writer(str(tmp_path / out / "canonical/model.safetensors"), 8)
            writer.write(0, memoryview(b"12345678"))
            with pytest.raises(InputError, match="files that mtx2vllm did not write"):
                convert(RUN, str(tmp_path / "root"), **KW)
            writer.commit()
        assert (tmp_path / out / "canonical/model.safetensors").read_bytes() == b"12345678"


def test_nothing_is_written_into_a_version(tmp_path: Path) -> None:
    version = tmp_path / "root" / "1"
    convert(RUN, str(version), **KW)
    before = content(version)
    with pytest.raises(InputError, match="is a version itself"):
        convert(RUN, str(version / "7"), **KW)
    with pytest.raises(InputError, match="is a version itself"):
        adopt(CONFIG, str(version / "8"))
    with pytest.raises(InputError, match="is a version itself"):
        fetch_version(str(version), str(version / "9"))
    assert content(version) == before and verify_version(str(version)).ok
