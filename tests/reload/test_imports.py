"""What an import may cost: the agent runs in other people's processes."""

import subprocess
import sys

import pytest

HEAVY = (
    "jax",
    "torch",
    "vllm",
    "tpu_inference",
    "torchax",
    "orbax",
    "tensorstore",
    "maxtext",
    "MaxText",
    "ray",
    "transformers",
)


def loaded(statement: str) -> set[str]:
    """Top-level modules after a statement in a new process."""
    code = f"import sys; {statement}; print(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    return set(
        subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import mtx2vllm.reload", "from mtx2vllm.reload import ReloadAgent, load_version",
        "import mtx2vllm.reload.stage_worker", "import mtx2vllm.reload.settings", "import mtx2vllm.converter.fleet.versions",
        "import mtx2vllm.converter.version.verify, mtx2vllm.converter.version.compare",
    ],
)  # fmt: skip
def test_no_engine_and_no_checkpoint_reader(statement: str) -> None:
    assert not loaded(statement) & set(HEAVY)


def test_the_package_itself_costs_nothing() -> None:
    found = loaded("import mtx2vllm.reload")
    assert not found & {"numpy", "pydantic", "watchdog", "prometheus_client", "blake3"}


def test_lazy_names() -> None:
    import mtx2vllm.reload as package

    assert all(getattr(package, name).__name__ == name for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_local_roots_do_not_load_the_cloud_client() -> None:
    statement = "from mtx2vllm.reload import aspire; aspire.look('/nowhere'); from mtx2vllm.reload import ReloadAgent"
    assert "google" not in loaded(statement) or "google.cloud.storage" not in loaded(statement)


def test_no_pickle_crosses_between_our_processes() -> None:
    """Neither pickle nor multiprocessing (whose queues pickle) is used by the staging process."""
    assert not loaded("import mtx2vllm.reload.stage_worker") & {"multiprocessing", "cloudpickle", "dill"}
