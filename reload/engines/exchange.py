"""The two ways to put new arrays into a live model, each all or nothing.

`double`: build everything on the device while the engine runs, then exchange references. `inplace`: for models that
fill the device; finished arrays wait in host memory, and each unit's old arrays are freed before its new ones are
copied, so at no moment is more than the model on the device.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mtx2vllm.reload.engine import EngineBroken, SwapFailed, Weights
from mtx2vllm.reload.engines.layers import Unit
from mtx2vllm.reload.engines.live import Live, build, owned, placement, put

Arrays = dict[str, Any]
Places = dict[str, dict[str, Any]]
REST_S = 0.5  # at most, after a unit
Group = tuple[str, Arrays, Callable[[], Arrays]]


def touched(units: Sequence[Unit], weights: Weights) -> list[Unit]:
    """The units that hold any of `weights`."""
    return [unit for unit in units if any(name in weights for name in unit.specs)]


def shared(units: Iterable[Unit], busy: Callable[[], bool]) -> Iterator[Unit]:
    """The units; while the engine is busy the time that one took is left to it before the next.

    Building runs on the host's cores, where the engine schedules, and (on a CPU) on the very threads that run its steps.
    """
    for unit in units:
        begun = time.monotonic()
        yield unit
        if busy():
            time.sleep(min(time.monotonic() - begun, REST_S))


# --- double ---


def build_on_device(
    live: Live, units: Sequence[Unit], weights: Weights, busy: Callable[[], bool]
) -> dict[str, jax.Array]:
    """All new arrays on the devices, beside the old ones. The model is not touched."""
    now = live.arrays()
    new: dict[str, jax.Array] = {}
    for unit in shared(touched(units, weights), busy):
        new |= {name: put(array, placement(now[name])) for name, array in build(unit, weights).items()}
    return new


def exchange(live: Live, new: dict[str, jax.Array]) -> None:
    """Let the model hold `new`.

    Raises:
        SwapFailed: it failed half way, and every old array is back.
    """
    old = live.arrays()
    done: list[str] = []
    try:
        for name, array in new.items():
            done.append(name)
            live.install(name, array)
    except Exception as error:
        put_back(lambda: _install(live, {name: old[name] for name in done}), error)
        raise SwapFailed(f"the exchange of weights failed at {done[-1]}: {error}; the old ones are back") from error


# --- in place ---


@dataclass(frozen=True, slots=True)
class InPlace:
    """Per unit: its name for messages, the new arrays in host memory, and how to get the old ones there."""

    groups: tuple[Group, ...]


def build_on_host(
    live: Live, units: Sequence[Unit], weights: Weights, undo: Weights | None, busy: Callable[[], bool]
) -> InPlace:
    """New arrays, finished, in host memory, and an undo source secured: `undo` (canonical tensors of what is loaded),
    or a copy of the old arrays. The model is not touched."""
    now = live.arrays()
    groups: list[Group] = []
    for unit in shared(touched(units, weights), busy):
        new = {name: in_memory(array) for name, array in build(unit, weights).items()}
        if undo is not None and all(name in undo for name in unit.specs if name in weights):
            old = _from(unit, undo)
        else:
            old = _kept({name: host_copy(now[name]) for name in new})
        groups.append((next(iter(unit.specs)), new, old))
    return InPlace(tuple(groups))


def in_memory(array: Any) -> jax.Array:
    """An array of the host's that is no memory map: the pause must not wait for a disk, nor for fresh pages."""
    if isinstance(array, jax.Array):
        return array
    return jax.block_until_ready(jax.device_put(owned(array), jax.local_devices(backend="cpu")[0]))


def host_copy(array: jax.Array) -> NDArray[Any]:
    """A copy in host memory that no device can take back."""
    return owned(np.asarray(jax.device_get(array)))


def _from(unit: Unit, undo: Weights) -> Callable[[], Arrays]:
    return lambda: build(unit, undo)


def _kept(arrays: Arrays) -> Callable[[], Arrays]:
    return lambda: arrays


def write(live: Live, change: InPlace) -> None:
    """Replace unit by unit.

    Raises:
        SwapFailed: it failed half way, and the old values are back.
        EngineBroken: they could not be put back.
    """
    now = live.arrays()
    places = {name: placement(now[name]) for _, new, _ in change.groups for name in new}
    del now
    done = 0
    try:
        for _, new, _ in change.groups:
            done += 1
            _replace(live, new, places)
    except Exception as error:
        at = change.groups[done - 1][0]
        put_back(lambda: _replace_all(live, change.groups[:done], places), error)
        raise SwapFailed(f"writing {at} into the engine failed: {error}; the old weights are back") from error


def _replace_all(live: Live, groups: Sequence[Group], places: Places) -> None:
    for _, _, old in groups:
        _replace(live, old(), places)


def _install(live: Live, arrays: Arrays) -> None:
    for name, array in arrays.items():
        live.install(name, array)


def _replace(live: Live, arrays: Arrays, places: Places) -> None:
    for name in arrays:
        live.install(name, None)
    for name, array in arrays.items():
        live.install(name, put(array, places[name]))


def put_back(restore: Callable[[], None], cause: Exception) -> None:
    """Run `restore`. Raises EngineBroken when it fails."""
    try:
        restore()
    except Exception as error:
        raise EngineBroken(f"a swap failed ({cause}), and putting the old weights back failed too: {error}") from error
