"""Reading objects over the connection's own pool: straight into the caller's buffer, resumed where it broke."""

from google.api_core import exceptions as api

from mtx2vllm.converter.storage import split_gs
from mtx2vllm.converter.storage.gs_http import Connection, announced_checksum, body_into, checksum
from mtx2vllm.converter.storage.retry import Transient


def whole(connection: Connection, path: str, start: int) -> bytes:
    """An object from `start` to its end; from its beginning, also checked against its CRC-32C.

    Raises:
        Transient: the body broke off, or its bytes are wrong. See `Connection.media` for the others.
    """
    try:
        answer = connection.media(*split_gs(path), f"bytes={start}-" if start else None)
    except api.RequestRangeNotSatisfiable:
        return b""
    out = bytearray(int(answer.headers.get("content-length", 0)))
    done = body_into(answer, memoryview(out))
    if done < len(out):
        raise Transient(f"the body broke off after {done} of {len(out)} bytes")
    data, announced = bytes(out), None if start else announced_checksum(answer)
    if announced is not None and announced != checksum(data):
        raise Transient("the bytes do not match the object's crc32c")
    return data


class Transfer:
    """A range on its way into `out`: what has come, and of which generation."""

    def __init__(self, connection: Connection, path: str, start: int, out: memoryview) -> None:
        self._connection, self._path, self._start, self._out = connection, path, start, out
        self._done, self._generation = 0, ""

    def go_on(self) -> None:
        """Ask for what is missing.

        Raises:
            Transient: there is still something missing, or the object was replaced meanwhile.
            EOFError: the object ends within the range. See `Connection.media` for the others.
        """
        first, last = self._start + self._done, self._start + len(self._out) - 1
        try:
            answer = self._connection.media(*split_gs(self._path), f"bytes={first}-{last}")
        except api.RequestRangeNotSatisfiable:
            raise EOFError(f"{self._path} ends before byte {first}") from None
        try:
            self._require_generation(answer.headers.get("x-goog-generation", ""))
            self._require_range(answer.headers.get("content-range", ""), first, last)
        except BaseException:
            answer.close()
            raise
        self._done += body_into(answer, self._out[self._done :])
        if self._done < len(self._out):
            raise Transient(f"the body broke off after {self._done} of {len(self._out)} bytes")

    def _require_generation(self, now: str) -> None:
        if self._done and now != self._generation:
            self._done = 0
            raise Transient("the object was replaced while it was read")
        self._generation = now

    def _require_range(self, content_range: str, first: int, last: int) -> None:
        """`bytes 2-4/10` must be the range that was asked for; a store cuts it silently at the object's end."""
        span, _, total = content_range.removeprefix("bytes ").partition("/")
        if total.isdecimal() and int(total) <= last:
            raise EOFError(f"{self._path} has {total} bytes, {last + 1} were expected")
        if span != f"{first}-{last}":
            raise Transient(f"another range was answered than asked for: {content_range!r}, not {first}-{last}")
