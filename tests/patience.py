"""Starting Ray on a machine that is busy with other tests."""

from collections.abc import Callable

ATTEMPTS = 6


def patiently[T](start: Callable[[], T], clean: Callable[[], object] = lambda: None) -> T:
    """Call `start` until it succeeds: Ray gives its own processes 30 s, which a busy machine may not manage at once."""
    for _ in range(ATTEMPTS - 1):
        try:
            return start()
        except Exception:
            clean()
    return start()
