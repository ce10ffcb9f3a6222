"""From a checkpoint in a bucket to a version in a bucket to a local directory, with the commands that users type."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from data_files import DATA, digests, oracle

from gcs import proxy
from mtx2vllm.converter import conversion
from mtx2vllm.converter.cli import main
from mtx2vllm.converter.errors import NotCommitted
from mtx2vllm.converter.storage import join
from mtx2vllm.converter.storage.gs import GsStore
from mtx2vllm.converter.version.fetch import fetch_version
from mtx2vllm.converter.version.verify import load_manifest, verify_version

COMMAND = Path(sys.executable).with_name("mtx2vllm")
ORACLE = DATA / "qwen3" / "canonical_digests.json"


def upload(store: GsStore, local: Path, location: str) -> None:
    for path in sorted(local.rglob("*")):
        if path.is_file():
            store.replace(join(location, path.relative_to(local).as_posix()), path.read_bytes())


@pytest.fixture
def run(store: GsStore, bucket: str) -> str:
    """A run in a bucket, with a name that asks for trouble."""
    upload(store, DATA / "qwen3" / "scanned", join(bucket, "run 1/ü/checkpoints"))
    upload(store, DATA / "qwen3" / "hf", join(bucket, "hf"))
    return join(bucket, "run 1/ü/checkpoints")


def command(*arguments: str, status: int = 0) -> str:
    """Run the command line in this process; everything it said."""
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == status, done.output
    assert "Traceback" not in done.output
    return done.output


def expect(version: Path) -> None:
    """The tensors are vLLM's own."""
    assert {n: d["sha256"] for n, d in digests(version / "canonical").items()} == {
        n: d["sha256"] for n, d in oracle(ORACLE).items()
    }


def test_every_command_takes_gs(
    run: str, store: GsStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.chdir(scratch)
    out, hf = join(bucket, "versions/100"), join(bucket, "hf")
    command("convert", f"{run}/", f"{out}/", "--hf-config", hf)
    assert list(scratch.rglob("*")) == []
    names = [f"canonical/model.safetensors{end}" for end in ("", ".index.json")]
    assert list(store.walk(out)) == [*names, "config.json", "mtx2vllm.json"]
    assert "qwen3" in command("inspect", run)
    assert "100" in command("versions", join(bucket, "versions"))
    command("verify", out)
    command("fetch", out, str(tmp_path / "copy"))
    expect(tmp_path / "copy")
    command("verify", str(tmp_path / "copy"), "--against", out)
    command("fetch", f"{out}/", str(tmp_path / "config"), "--config-only")
    assert [p.name for p in (tmp_path / "config").iterdir()] == ["config.json"]
    assert "finished version" in command("convert", run, out, "--hf-config", hf, status=3)
    before = store.stat(join(out, "mtx2vllm.json"))
    command("convert", run, out, "--hf-config", hf, "--overwrite")
    assert store.stat(join(out, "mtx2vllm.json")).generation > before.generation
    command("verify", out)


def test_only_parameters_are_fetched(store: GsStore, broken: proxy.Proxy, bucket: str) -> None:
    local = DATA / "trained" / "qwen3-scanned" / "checkpoints"
    upload(store, local, join(bucket, "trained"))
    done = conversion.convert(join(bucket, "trained"), join(bucket, "out"), hf_config=str(DATA / "qwen3" / "hf"))
    read = sum(count for path, count in broken.read.items() if "/d/" in path)
    step = local / str(done.step)
    stored = sum(path.stat().st_size for path in step.rglob("*") if path.is_file() and "/d/" in path.as_posix())
    # Weights with two moments each: a third of the bytes are parameters. The index is read along with them.
    print(f"{read} of {stored} bytes read")
    assert 0 < read < 0.5 * stored
    assert verify_version(join(bucket, "out")).ok


@pytest.mark.parametrize("arguments", [("verify",), ("inspect",), ("fetch",), ("convert",)])
def test_a_bucket_that_does_not_exist_is_one_sentence(bucket: str, tmp_path: Path, arguments: tuple[str]) -> None:
    more = {"fetch": [str(tmp_path / "x")], "convert": [str(tmp_path / "x")]}.get(arguments[0], [])
    said = command(*arguments, "gs://no-such-bucket-at-all/x", *more, status=3)
    assert "'no-such-bucket-at-all' does not exist" in said
    assert said.count("error:") == 1
    assert not (tmp_path / "x").exists()


def test_of_two_converters_exactly_one_wins(run: str, store: GsStore, bucket: str, tmp_path: Path) -> None:
    out = join(bucket, "versions/100")
    line = [str(COMMAND), "convert", run, out, "--hf-config", str(DATA / "qwen3" / "hf")]
    racers = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [racer.communicate(timeout=120)[1] for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [0, 3], said
    for racer, text in zip(racers, said, strict=True):
        if racer.returncode:
            assert any(word in text for word in ("being written by process", "finished version", "another writer"))
    assert verify_version(out).ok
    fetch_version(out, str(tmp_path / "copy"))
    expect(tmp_path / "copy")


def test_a_killed_converter_leaves_no_version_and_the_next_run_cleans(
    run: str, store: GsStore, broken: proxy.Proxy, bucket: str
) -> None:
    out, line = join(bucket, "100"), [str(COMMAND), "convert", run, join(bucket, "100")]
    broken.choose = lambda request: "503" if "compose" in request.path else None  # it cannot finish
    killed = subprocess.Popen([*line, "--hf-config", str(DATA / "qwen3" / "hf")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any("parts" in name for name in store.walk(out)) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert any("parts" in name for name in store.walk(out))
    with pytest.raises(NotCommitted):
        load_manifest(out)
    broken.choose = lambda _: None
    conversion.convert(run, out, hf_config=str(DATA / "qwen3" / "hf"))
    assert verify_version(out).ok
    assert [name for name in store.walk(out) if "/." in f"/{name}"] == []


def test_at_one_fault_in_twenty_a_conversion_and_ten_fetches_are_bit_identical(
    run: str, store: GsStore, broken: proxy.Proxy, bucket: str, tmp_path: Path
) -> None:
    broken.at_random(0.05, seed=4)
    out = join(bucket, "versions/100")
    conversion.convert(run, out, hf_config=join(bucket, "hf"))
    for number in range(10):
        fetch_version(out, str(tmp_path / str(number)))
        expect(tmp_path / str(number))
    assert sum(broken.faults.values()) > 0.02 * sum(broken.requests.values())
    assert {method for _, method in broken.faults} >= {"GET", "POST"}
    # A shard of this size goes up in one request a part: PUT is met by the tests of large objects.
    assert set(broken.requests) <= {"GET", "POST", "DELETE", "PUT"}


@pytest.mark.parametrize("part", ["manifest.ocdbt", "/items/d/"])
def test_an_index_that_arrives_damaged_is_read_again(
    run: str, broken: proxy.Proxy, bucket: str, tmp_path: Path, part: str
) -> None:
    seen = 0

    def choose(request: proxy.Request) -> str | None:
        nonlocal seen
        seen += request.method == "GET" and part in request.path
        return "wrong" if part in request.path and seen % 7 == 3 else None

    broken.choose = choose
    conversion.convert(run, join(bucket, "100"), hf_config=join(bucket, "hf"))
    assert broken.faults["wrong", "GET"] >= 3
    fetch_version(join(bucket, "100"), str(tmp_path / "copy"))
    expect(tmp_path / "copy")


@pytest.mark.parametrize(("part", "method"), [("safetensors", "POST"), ("mtx2vllm.json", "POST"), ("/d/", "GET")])
def test_a_refusal_in_mid_conversion_loses_nothing(
    run: str, store: GsStore, broken: proxy.Proxy, bucket: str, part: str, method: str
) -> None:
    kept, out = join(bucket, "versions/90"), join(bucket, "versions/100")
    conversion.convert(run, kept, hf_config=join(bucket, "hf"))
    before = list(store.walk(bucket))

    def choose(request: proxy.Request) -> str | None:  # an upload names its object in the body
        named = request.path.encode() + request.body[:2000]
        return "403" if request.method == method and part.encode() in named else None

    broken.choose = choose
    said = command("convert", run, out, "--hf-config", join(bucket, "hf"), status=3)
    assert "denied" in said
    broken.choose = lambda _: None
    assert list(store.walk(bucket)) == before
    assert verify_version(kept).ok


def test_a_shard_that_is_gone_is_named_and_nothing_is_committed(
    run: str, store: GsStore, bucket: str, tmp_path: Path
) -> None:
    out = join(bucket, "100")
    conversion.convert(run, out, hf_config=join(bucket, "hf"))
    store.delete(join(out, "canonical/model.safetensors"))
    said = command("fetch", out, str(tmp_path / "copy"), status=3)
    assert f"{out}/canonical/model.safetensors is missing" in said
    assert not (tmp_path / "copy").exists()
