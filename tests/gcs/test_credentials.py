"""Whose credentials: Application Default Credentials, none at all, and ones that are refused."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from mtx2vllm.converter.errors import StorageError, StoreUnavailable
from mtx2vllm.converter.storage.gs import GsStore
from mtx2vllm.converter.storage.gs_http import EMULATOR, Connection
from mtx2vllm.converter.storage.retry import Policy

HASTY = Policy(first=0.01, longest=0.02, deadline=0.2)


class _Tokens(BaseHTTPRequestHandler):
    """An endpoint that gives no tokens."""

    status = 400

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"error": "invalid_grant", "error_description": "account not found"}')

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Tokens]]:
    """Application Default Credentials of a service account, whose token endpoint is ours."""

    class Tokens(_Tokens):
        pass

    server = HTTPServer(("127.0.0.1", 0), Tokens)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    content = {
        "type": "service_account", "project_id": "p", "private_key_id": "k", "private_key": key.decode(),
        "client_email": "a@p.iam.gserviceaccount.com", "token_uri": f"http://127.0.0.1:{server.server_port}/token",
    }  # fmt: skip
    (tmp_path / "account.json").write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.delenv(EMULATOR, raising=False)
    yield Tokens
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize("verb", ["read", "read_into", "stat", "listdir", "create"])
def test_credentials_that_are_refused_are_one_sentence(verb: str) -> None:
    store = GsStore(None, HASTY)
    verbs = {
        "read": lambda: store.read("gs://b/x"),
        "read_into": lambda: store.read("gs://b/x", 1, 1),
        "stat": lambda: store.stat("gs://b/x"),
        "listdir": lambda: store.listdir("gs://b/x"),
        "create": lambda: store.create("gs://b/x", b""),
    }
    with pytest.raises(
        StorageError, match=r"credentials were not accepted.*gcloud auth application-default login"
    ) as e:
        verbs[verb]()
    assert not isinstance(e.value, StoreUnavailable)


def test_default_credentials_are_googles(account: object) -> None:
    connection = Connection(None)
    assert connection.client.api_endpoint == "https://storage.googleapis.com"
    assert not connection.anonymous


def test_without_credentials_public_buckets_are_still_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (EMULATOR, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert Connection(None).anonymous


def test_a_credentials_file_that_is_damaged_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EMULATOR, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StorageError, match=r"none\.json"):
        GsStore(None, HASTY).read("gs://b/x")
