"""A proxy in front of the emulator that breaks what it is told to break, and counts it.

    429 503 403 404     answered instead of the server
    refuse              the connection is reset before anything is answered
    reset               the connection is reset in the middle of the body
    truncate            the connection is closed cleanly in the middle of the body
    wrong               one byte of the content is flipped (read: on the way back; written: on the way there)
    lost                the server does its work, and the answer never comes
    slow                the answer comes in two halves, a while apart

`python -m gcs.proxy URL LATENCY` runs it in a process of its own and prints its address.
"""

import contextlib
import http.client
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TRANSIENT = ("429", "503", "refuse", "reset", "truncate", "wrong", "lost", "slow")
TOTALS: "Counter[tuple[str, str]]" = Counter()  # over all proxies of the process
_TEXT = {"429": "rateLimitExceeded", "503": "backendError", "403": "forbidden", "404": "notFound"}
_HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Request:
    """What a rule may look at. `content` says whether bytes of an object travel (not only metadata)."""

    method: str
    path: str
    content: bool
    span: str = ""  # the Range header
    agent: str = ""  # the User-Agent header
    body: bytes = b""


@dataclass
class Proxy:
    """`choose` names the fault of a request or None; `faults` counts (fault, method), `requests` methods."""

    url: str
    choose: Callable[[Request], str | None] = lambda _: None
    latency: float = 0.0  # seconds before every answer
    faults: "Counter[tuple[str, str]]" = field(default_factory=Counter)
    requests: "Counter[str]" = field(default_factory=Counter)
    read: "Counter[str]" = field(default_factory=Counter)  # bytes of objects sent to clients, by path
    connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, request: Request) -> str | None:
        with self.lock:
            self.requests[request.method] += 1
            fault = self.choose(request)
            if fault:
                self.faults[fault, request.method] += 1
                TOTALS[fault, request.method] += 1
            return fault

    def first(self, times: int, fault: str, method: str = "", part: str = "", content: bool = False) -> None:
        """Break the first `times` requests of a method whose path holds `part`."""
        left = times

        def choose(request: Request) -> str | None:
            nonlocal left
            fits = (not method or request.method == method) and part in request.path
            if left > 0 and fits and (request.content or not content):
                left -= 1
                return fault
            return None

        self.choose = choose

    def at_random(self, rate: float, seed: int, kinds: tuple[str, ...] = TRANSIENT) -> None:
        """Break a share of the requests of each method, so that none gets away; the kind is drawn. `wrong` strikes
        what a checksum guards: objects, not listings, and not the values of a checkpoint (MaxText writes zstd frames
        without a checksum, and TensorStore reads ranges, of which the store knows none)."""
        chance, period, seen = random.Random(seed), round(1 / rate), Counter[str]()

        def choose(request: Request) -> str | None:
            seen[request.method] += 1
            if seen[request.method] % period != min(3, period - 1):
                return None
            kind = chance.choice(kinds)
            guarded = request.content and "tensorstore" not in request.agent
            return kind if guarded or kind != "wrong" else "503"

        self.choose = choose


@contextlib.contextmanager
def proxy(upstream: str, latency: float = 0.0) -> Iterator[Proxy]:
    """A running proxy before the server at `upstream`."""
    state = Proxy("", latency=latency)

    class Bound(_Relay):
        target, proxy = upstream, state

    server = _Server(("127.0.0.1", 0), Bound)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no event."""


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: str
    proxy: Proxy
    wbufsize = 1 << 16

    def log_message(self, *_: object) -> None:
        """Silence."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.proxy.lock:
            self.proxy.connections += 1
        self._upstream = http.client.HTTPConnection(urlsplit(self.target).netloc)

    def finish(self) -> None:
        self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def _relay(self) -> None:
        body = self._body()
        content = "alt=media" in self.path or "/upload/" in self.path
        seen = (self.headers.get("range", ""), self.headers.get("user-agent", ""))
        request = Request(self.command, unquote(urlsplit(self.path).path), content, *seen, body)
        fault = self.proxy.decide(request)
        if self.proxy.latency:
            time.sleep(self.proxy.latency)
        if fault in _TEXT:
            text = b'{"error": {"code": %s, "message": "%s"}}' % (fault.encode(), _TEXT[fault].encode())
            self._answer(int(fault), [("Content-Type", "application/json")], text, None)
            return
        if fault == "refuse":
            self._reset()
            return
        if fault == "wrong" and body:
            body = _flipped(body)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in {*_HOP, "host"}}
        self._upstream.request(self.command, self.path, body=body or None, headers=headers)
        answer = self._upstream.getresponse()
        data = answer.read()
        if fault == "lost":
            self._reset()
            return
        if content and self.command == "GET" and answer.status < 300:
            with self.proxy.lock:
                self.proxy.read[request.path] += len(data)
        if fault == "wrong" and self.command == "GET" and answer.status < 300 and data:
            half = len(data) // 2
            data = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        # The server hands out its own address for resumable uploads; those must come through here as well.
        kept = [(n, v.replace(self.target, self.proxy.url)) for n, v in answer.getheaders() if n.lower() not in _HOP]
        self._answer(answer.status, kept, data, fault)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _relay  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: str | None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length":
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        if fault in {"reset", "truncate"}:
            self.wfile.write(data[:half])
            self.wfile.flush()
            self.close_connection = True
            if fault == "reset":
                self._reset()
        elif fault == "slow":
            self.wfile.write(data[:half])
            self.wfile.flush()
            time.sleep(0.3)
            self.wfile.write(data[half:])
        else:
            self.wfile.write(data)
        with contextlib.suppress(OSError):
            self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def _flipped(body: bytes) -> bytes:
    """The last byte of the content flipped; in a multipart body that is the one before the closing boundary."""
    end = body.rfind(b"\r\n--", 0, len(body) - 2) if body.rstrip().endswith(b"--") else len(body)
    return body[: end - 1] + bytes([body[end - 1] ^ 1]) + body[end:]


if __name__ == "__main__":
    with proxy(sys.argv[1], float(sys.argv[2])) as running:
        print(running.url, flush=True)
        sys.stdin.read()
