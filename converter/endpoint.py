"""A few read-only pages over HTTP: metrics for Prometheus, health for an orchestrator. Nothing comes in by it."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtx2vllm.converter.errors import InputError

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
    """A server on a thread of its own. Pages are made when asked for."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                make = pages.get(self.path.split("?", 1)[0])
                page = make() if make else Page(b"not found\n", 404)
                self.send_response(page.status)
                self.send_header("Content-Type", page.kind)
                self.send_header("Content-Length", str(len(page.body)))
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, format: str, *args: Any) -> None:
                """Probes are no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"nothing can listen on {host}:{port} ({error}); choose another --port, or 0 for any free one"
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="mtx2vllm-http", daemon=True)

    @property
    def port(self) -> int:
        """The port in use, which port 0 leaves to the system."""
        return int(self._server.server_address[1])

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
