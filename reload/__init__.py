"""The agent in a running sampler: it follows a root of versions and swaps the newest into the engine between two steps.

`ReloadAgent(llm, root).start()` follows; `load_version(llm, path)` loads one version, without a thread. Both names are
loaded when first used: importing this package costs nothing and pulls in neither the engine nor a checkpoint reader.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtx2vllm.reload.agent import ReloadAgent, load_version

__all__ = ["ReloadAgent", "load_version"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mtx2vllm.reload import agent

    return getattr(agent, name)
