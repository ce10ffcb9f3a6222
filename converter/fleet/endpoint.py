"""A few read-only pages over HTTP: metrics for Prometheus, health for an orchestrator. Nothing comes in by it."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from mtx2vllm.converter.errors import InputError

log = logging.getLogger(__name__)

_AT_ONCE = 32
_EXCHANGE_S = 2.0
_HEAD_BYTES = 8192
TEXT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' exposition format


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    status: int = 200
    kind: str = TEXT


def health(ok: bool, facts: Mapping[str, Any]) -> Page:
    """200 or 503, with facts as JSON."""
    body = json.dumps({"ok": ok, **facts}).encode() + b"\n"
    return Page(body, 200 if ok else 503, "application/json")


class Endpoint:
    """A server on threads of its own. Pages are made when asked for.

    It may be reachable by a whole cluster, so nobody can keep it busy: requests are short, an exchange has two seconds
    in all, and where too many are open the oldest is cut off for the newest. Nothing is read but the first line, and
    only fixed paths are answered.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"nothing can listen on {host}:{port} ({error}); choose another --port, or 0 for any free one"
            ) from None
        self._thread = threading.Thread(target=self._accept, name="mtx2vllm-http", daemon=True)

    @property
    def port(self) -> int:
        """The port in use, which port 0 leaves to the system."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; exchanges under way end by themselves."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() does not
        self._socket.close()

    def __enter__(self) -> "Endpoint":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.1)  # out of descriptors, or reset before we came; the next one may do
                continue
            with self._lock:
                for oldest in list(self._open)[: max(len(self._open) - _AT_ONCE + 1, 0)]:
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self._open[connection] = None
            threading.Thread(target=self._exchange, args=(connection,), name="mtx2vllm-http", daemon=True).start()

    def _exchange(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _EXCHANGE_S
        try:
            with contextlib.suppress(OSError):
                head = _head(connection, deadline)
                if head is not None:
                    connection.settimeout(max(deadline - time.monotonic(), 0.1))
                    connection.sendall(self._answer(head))
        finally:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path, _, protocol = rest.partition(b" ")
        page = self._page(method, path, protocol)
        lines = [
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
            f"Content-Type: {page.kind}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else page.body)

    def _page(self, method: bytes, path: bytes, protocol: bytes) -> Page:
        if not protocol.startswith(b"HTTP/1."):
            return Page(b"bad request\n", 400)
        if method not in {b"GET", b"HEAD"}:
            return Page(b"only GET and HEAD\n", 405)
        make = self._pages.get(path.partition(b"?")[0].decode("latin-1"))
        if make is None:
            return Page(b"not found\n", 404)
        try:
            return make()
        except Exception:
            log.exception("a page could not be made")
            return Page(b"failed; see the log\n", 500)


def _head(connection: socket.socket, deadline: float) -> bytes | None:
    """A request up to the empty line; None where it is too long, too slow, or never comes."""
    head = b""
    while b"\r\n\r\n" not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) > _HEAD_BYTES:
            return None
        connection.settimeout(left)
        part = connection.recv(4096)
        if not part:
            return None
        head += part
    return head
