"""A conversion over Ray workers into a bucket: guests send parts, the driver composes them."""

import sys
from pathlib import Path

import pytest
from patience import patiently

from mtx2vllm.converter.conversion import convert
from mtx2vllm.converter.execute import slabs as slabs_module
from mtx2vllm.converter.execute import units as units_module
from mtx2vllm.converter.storage import store_for
from mtx2vllm.converter.version.verify import verify_version

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import make_checkpoint


@pytest.fixture
def ray(bucket):
    """A cluster whose workers know the emulator from their environment."""
    found = pytest.importorskip("ray", reason="the ray extra has wheels up to Python 3.13")
    patiently(
        lambda: found.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False), found.shutdown
    )
    yield found
    found.shutdown()


def test_a_bucket_receives_the_same_bytes(ray, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(slabs_module, "SMALL", 0)
    monkeypatch.setattr(units_module, "SMALLEST", 0)
    sizes = make_checkpoint.Sizes(64, 3, 96, 4, 2, 16, 512, 8, False)
    make_checkpoint.make(tmp_path / "checkpoint", sizes, {"expert": 4, "fsdp": 2})
    here, there = str(tmp_path / "here"), f"{bucket}/there"
    convert(str(tmp_path / "checkpoint"), here)
    convert(str(tmp_path / "checkpoint"), there, executor="ray")
    store = store_for(there)
    shards = list(Path(here).rglob("*.safetensors"))
    assert shards
    for path in shards:
        assert store.read(f"{there}/{path.relative_to(here)}") == path.read_bytes()
    assert verify_version(there, None).ok
    assert not [name for name in store.walk(there) if ".mtx2vllm" in name], "a part was left behind"
