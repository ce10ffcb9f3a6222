"""Checks of whole loads, through the agent: many of them, and what does not fit."""

import gc
import tempfile
from pathlib import Path
from typing import Any

from versions import write_version

from .canonical import Tensors
from .scenario import Session, generated

SETTLED = 5  # loads after which nothing may grow any more


def reloads(session: Session, count: int = 10) -> dict[str, Any]:
    """`count` loads of A and B in turn, doubled and in place, with answers in between; memory after each."""
    from mtx2vllm.reload import ReloadAgent

    rows: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        versions = {1: session.a, 2: session.b}
        for step, tensors in versions.items():
            write_version(root / str(step), tensors)
        ways = {mode: ReloadAgent(session.engine, str(root), swap=mode, hold=False) for mode in ("double", "inplace")}
        digests: dict[int, set[str]] = {1: set(), 2: set()}
        for number in range(count):
            step = number % 2 + 1
            agent = ways[("double", "inplace")[number // 2 % 2]]
            # The other agent has loaded since: this one must not take what it loaded last for what is there.
            agent._replica._loaded = None
            agent.load(step)
            generated(session.llm)
            rows.append(_memory())
            if number % 10 < 2 or number >= count - 2:
                digests[step].add(session.engine.digest())
        for agent in ways.values():
            agent.stop()
    settled, last = rows[SETTLED - 1], rows[-1]
    return {
        "reloads": count,
        "grown": last[0] - settled[0],
        "arrays": [settled[1:], last[1:]],
        "states": [len(found) for found in digests.values()],
        "resident": [row[0] for row in rows],
    }


def reloads_50(session: Session) -> dict[str, Any]:
    return reloads(session, 50)


def _memory() -> list[int]:
    """Resident bytes, live arrays, and their bytes."""
    import jax

    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024
    arrays = jax.live_arrays()
    return [resident, len(arrays), sum(array.nbytes for array in arrays)]


def misfits(session: Session) -> dict[str, Any]:
    """Versions of another size, of another model and in part are refused whole, and the engine does not notice."""
    from mtx2vllm.reload import load_version

    session.swap(session.a, 1)
    before, version = session.engine.digest(), session.llm.llm_engine.get_weight_version()
    cases: dict[str, Tensors] = {
        "smaller": {name: x[: len(x) // 2] for name, x in session.a.items()},
        "another": {name.replace("self_attn", "attention"): x for name, x in session.a.items()},
        "part": dict(list(session.a.items())[1:]),
        "wider": {name: x.astype("float32") for name, x in session.a.items()},
    }
    messages = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (case, tensors) in enumerate(cases.items()):
            path = write_version(Path(folder) / str(number + 2), tensors)
            try:
                load_version(session.llm, str(path))
            except Exception as error:
                messages[case] = f"{type(error).__name__}: {error}"
    return {
        "messages": messages,
        "unchanged": session.engine.digest() == before,
        "version": session.llm.llm_engine.get_weight_version() == version,
    }
