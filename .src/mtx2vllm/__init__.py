"""MaxText checkpoints to vLLM: an exact, streaming converter (`mtx2vllm.converter`) and a hot-reload agent
(`mtx2vllm.reload`).

Importing this package costs nothing: `__version__` is looked up when it is asked for.
"""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("mtx2vllm")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
