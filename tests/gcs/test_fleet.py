"""The fleet's commands on a bucket: what a follower waits for, and one writer, by the store's own preconditions."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from data_files import DATA, digests, oracle
from fleet.run_source import CONFIG, STEPS
from fleet.simulation import simulate

from gcs.test_end_to_end import upload
from mtx2vllm.converter.cli import main
from mtx2vllm.converter.conversion import Options
from mtx2vllm.converter.fleet import follow as following
from mtx2vllm.converter.fleet.follow import Follower, Following, Stop
from mtx2vllm.converter.fleet.follow_lease import RootLease
from mtx2vllm.converter.storage import join
from mtx2vllm.converter.storage.gs import GsStore
from mtx2vllm.converter.version.fetch import fetch_version
from mtx2vllm.converter.version.verify import load_manifest, verify_version


class Bucket:
    """A run and a root in a bucket."""

    def __init__(self, store: GsStore, bucket: str) -> None:
        self.store, self.run, self.root = store, join(bucket, "run"), join(bucket, "root")

    def write(self, step: int, commit: bool = True) -> None:
        """As Orbax in a bucket: under the final name, the marker last."""
        place = join(self.run, "checkpoints", str(step))
        for path in sorted(p for p in (STEPS / "3").rglob("*") if p.is_file() and p.parent != STEPS / "3"):
            self.store.replace(join(place, path.relative_to(STEPS / "3").as_posix()), path.read_bytes())
        self.store.replace(join(place, "_CHECKPOINT_METADATA"), (STEPS / "3/_CHECKPOINT_METADATA").read_bytes())
        if commit:
            self.commit(step)

    def commit(self, step: int) -> None:
        self.store.replace(join(self.run, "checkpoints", str(step), "commit_success.txt"), b"done")

    def follower(self, every: int | None = None, **options: object) -> Follower:
        chosen = Following(self.run, self.root, Options(hf_config=CONFIG, **options), every)  # type: ignore[arg-type]
        found = Follower(chosen, RootLease(self.root), Stop())
        assert found.lease.take() is None
        found.resume()
        return found

    def versions(self) -> list[int]:
        names = [e.name for e in self.store.listdir(self.root) if e.is_dir and e.name.isdigit()]
        return sorted(int(n) for n in names if self.store.stat(join(self.root, n, "mtx2vllm.json")))


@pytest.fixture
def cloud(store: GsStore, bucket: str) -> Bucket:
    return Bucket(store, bucket)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_a_step_counts_when_its_marker_is_there(cloud: Bucket, tmp_path: Path) -> None:
    follower = cloud.follower(layout="hf", dtype="float32")
    assert not follower.turn()  # the run does not exist yet
    cloud.write(9)
    cloud.write(10, commit=False)
    assert follower.turn()
    assert cloud.versions() == [9]
    assert not follower.turn()
    cloud.commit(10)
    assert follower.turn()
    assert cloud.versions() == [9, 10]
    unchanged = load_manifest(join(cloud.root, "10"))[0].unchanged
    assert unchanged is not None
    assert (unchanged.version, unchanged.tensors) == (9, len(load_manifest(join(cloud.root, "10"))[0].tensors))
    fetch_version(join(cloud.root, "10"), str(tmp_path / "ten"))
    assert digests(tmp_path / "ten") == oracle(DATA / "trained/qwen3-scanned/maxtext_hf_step3_digests.json")
    follower.lease.give_back()


def test_one_writer(cloud: Bucket) -> None:
    follower = cloud.follower()
    rivals = [RootLease(cloud.root) for _ in range(4)]
    assert all(rival.take() for rival in rivals)
    follower.lease.beat()
    assert follower.lease.held()
    follower.lease.give_back()
    answers = [rival.take() for rival in rivals]
    assert answers.count(None) == 1
    for rival in rivals:
        rival.give_back()


def test_a_step_deleted_while_it_is_read_is_dropped(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.write(1)
    cloud.write(2)
    real = following.carry_out

    def carry_out(*args: object, **chosen: object) -> object:
        for name in list(cloud.store.walk(join(cloud.run, "checkpoints/2"))):
            if "/d/" in name:
                cloud.store.delete(join(cloud.run, "checkpoints/2", name))
        return real(*args, **chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(following, "carry_out", carry_out)
    follower = cloud.follower()
    follower.turn()
    monkeypatch.setattr(following, "carry_out", real)
    assert follower.status.counts["dropped"] == 1
    assert not list(cloud.store.walk(join(cloud.root, "2")))
    while follower.turn():
        pass
    assert cloud.versions() == [1]
    follower.lease.give_back()


def test_versions_pin_and_prune(cloud: Bucket) -> None:
    for step in (1, 2, 3):
        cloud.write(step)
    follower = cloud.follower(every=1)
    while follower.turn():
        pass
    follower.lease.give_back()
    assert run("pin", cloud.root, 1).exit_code == 0
    told = json.loads(run("prune", cloud.root, "--keep", 1, "--json").stdout)
    assert (told["removed"], told["kept"]) == ([2], {"3": "newest", "1": "pinned"})
    assert run("unpin", cloud.root).exit_code == 0
    assert run("prune", cloud.root, "--keep", 1).exit_code == 0
    assert cloud.versions() == [3]
    assert "complete, newest" in run("versions", cloud.root).stdout


def test_batch_and_adopt(cloud: Bucket, store: GsStore, bucket: str, tmp_path: Path) -> None:
    cloud.write(3)
    jobs = {"jobs": [{"checkpoint": cloud.run, "out": join(bucket, "out"), "layout": "hf", "hf_config": CONFIG}]}
    (tmp_path / "jobs.yaml").write_text(json.dumps(jobs))
    assert run("batch", tmp_path / "jobs.yaml").exit_code == 0
    again = json.loads(run("batch", tmp_path / "jobs.yaml", "--json").stdout)
    assert [job["result"] for job in again["jobs"]] == ["done before"]
    upload(store, DATA / "qwen3" / "hf", join(bucket, "theirs"))
    answer = run("adopt", join(bucket, "theirs"), "--as", join(cloud.root, "7"), "--json")
    assert json.loads(answer.stdout)["copied"] == 2
    assert verify_version(join(cloud.root, "7"), str(DATA / "qwen3/hf")).ok


@pytest.mark.usefixtures("store")
def test_replicas_on_a_bucket(bucket: str, tmp_path: Path) -> None:
    result = simulate(tmp_path, replicas=4, versions=3, pace=0.1, idle=1.0, followed=1.0, bucket=bucket, poll=1.0)
    assert result.on_newest == 4
    assert result.mixtures == 0
    assert all(loads == [1, 2, 3] for loads in result.loads)
    assert result.busy[1] <= 70  # a lease is written once a second at most


@pytest.mark.soak
@pytest.mark.usefixtures("store")
def test_sixty_four_replicas_on_a_bucket(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(tmp_path, replicas=64, versions=20, pace=10.0, idle=60.0, followed=0.0, bucket=bucket)
    with capsys.disabled():
        print("\n" + result.table())
    assert (result.on_newest, result.mixtures) == (64, 0)
    assert result.idle[0] <= 120
    assert result.idle[1] <= 4
