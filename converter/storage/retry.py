"""Trying again: exponential back-off with jitter, until a deadline."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtx2vllm.converter.errors import StoreUnavailable

_SAY = 2.0  # seconds; who waits longer wants to know for what
_log = logging.getLogger("mtx2vllm")


class Transient(Exception):
    """A fault that may pass. The text says what was seen."""


class Unreachable(Transient):
    """The store was not even connected to, and never has been by this process: more likely for good than for a moment."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How long and how eagerly to try again, in seconds. The delay doubles from `first` up to `longest`; `contact` is
    the deadline as long as every attempt was `Unreachable`."""

    first: float = 0.2
    longest: float = 15.0
    deadline: float = 180.0
    contact: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random  # in [0, 1)


def retrying[T](call: Callable[[], T], what: str, policy: Policy) -> T:
    """The result of `call`, called again after every `Transient`.

    Raises:
        StoreUnavailable: the deadline would pass before the next attempt; `what` and the last fault are named.
    """
    begun, delay, attempts = policy.clock(), policy.first, 0
    while True:
        try:
            return call()
        except Transient as fault:
            attempts += 1
            # Half of the delay is fixed, half is chance: many readers that failed together do not come back together.
            pause = delay * (0.5 + policy.chance() / 2)
            spent = policy.clock() - begun
            if isinstance(fault, Unreachable) and spent + pause > policy.contact:
                raise StoreUnavailable(
                    f"{what}: the store cannot be reached ({fault}); check the network and its proxy, the credentials and "
                    "the bucket's name, then run again."
                ) from fault
            if spent + pause > policy.deadline:
                raise StoreUnavailable(
                    f"{what}: the store gave no good answer in {attempts} attempts over {spent:.0f} s "
                    f"(last: {fault}); check the network and the store's status, then run again."
                ) from fault
            if pause > _SAY:
                _log.warning("%s: trying again in %.0f s (%s)", what, pause, fault)
            policy.sleep(pause)
            delay = min(delay * 2, policy.longest)


def looked_at_twice(start: Callable[[], Any], begun: Any = None) -> Any:
    """The result of a TensorStore operation, begun again where its bytes did not match their checksum: damage on the
    way is gone at the second look, damage at rest is not."""
    try:
        return (begun or start()).result()
    except ValueError as error:
        if not str(error).startswith("DATA_LOSS"):
            raise
        return start().result()
