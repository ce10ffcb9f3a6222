"""The connection to Google Cloud Storage: whose credentials, which endpoint, and what each fault means.

Google's client does metadata and writes. Ranges are read over its authorised urllib3 pool instead: the bytes land in
the caller's buffer as they come, and a transfer that breaks is resumed where it broke.
"""

import os
import socket
from typing import Any
from urllib.parse import quote

import google.auth
import google.auth.exceptions
import google.auth.transport.urllib3
import google_crc32c
import requests
import urllib3
from google.api_core import exceptions as api
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from mtx2vllm.converter.errors import StorageError
from mtx2vllm.converter.storage import GS, crc32c
from mtx2vllm.converter.storage.retry import Transient, Unreachable

EMULATOR = "STORAGE_EMULATOR_HOST"
TENSORSTORE = "TENSORSTORE_GCS_HTTP_URL"
TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two pieces of an answer
CONNECTIONS = 32  # more than anything here keeps busy at a time
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_PIECE = 1 << 20
_FAULT = 160  # characters of a fault that are told
# No name, no route, nobody listens, no answer to the first packet.
_NO_CONTACT = (
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
    ConnectionRefusedError,
    socket.gaierror,
)


class Connection:
    """An authorised client of one endpoint. `emulator` is the value of STORAGE_EMULATOR_HOST, or None."""

    def __init__(self, emulator: str | None) -> None:
        credentials, project = (AnonymousCredentials(), None) if emulator else _credentials()
        self.anonymous = isinstance(credentials, AnonymousCredentials)
        options = {"api_endpoint": with_scheme(emulator)} if emulator else None
        self.client = storage.Client(project=project or "none", credentials=credentials, client_options=options)
        timeout = urllib3.Timeout(connect=TIMEOUT[0], read=TIMEOUT[1])
        pool = urllib3.PoolManager(maxsize=CONNECTIONS, block=False, timeout=timeout, retries=False)
        self._http = google.auth.transport.urllib3.AuthorizedHttp(credentials, http=pool)

    def media(self, bucket: str, key: str, span: str | None) -> urllib3.BaseHTTPResponse:
        """The answer to a read of an object, its body still to come; `span` is the value of the Range header.

        Raises:
            Transient, StorageError, api.NotFound, api.RequestRangeNotSatisfiable.
        """
        object_ = f"{self.client.api_endpoint}/download/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media"
        headers = {"Range": span} if span else {}
        with faults(f"{GS}{bucket}/{key}", self.anonymous):
            answer: urllib3.BaseHTTPResponse = self._http.urlopen(
                "GET", object_, headers=headers, preload_content=False, decode_content=False, retries=False
            )
            if answer.status not in {200, 206}:
                raise api.from_http_status(answer.status, answer.data[:2000].decode(errors="replace"))
        return answer


def body_into(answer: urllib3.BaseHTTPResponse, out: memoryview) -> int:
    """Fill `out` from the body of an answer; how many bytes came before it ended or broke."""
    done = 0
    try:
        while done < len(out):
            piece = answer.read(min(_PIECE, len(out) - done), decode_content=False)
            if not piece:
                break
            out[done : done + len(piece)] = piece
            done += len(piece)
    except (urllib3.exceptions.HTTPError, OSError):
        pass
    # A body that is not read to its end leaves the connection useless for the next request.
    if done != int(answer.headers.get("content-length", -1)):
        answer.close()
    answer.release_conn()
    return done


class faults:  # noqa: N801 - reads as a statement
    """Turn what the libraries raise about `path` into `Transient` or `StorageError`; let 404, 412 and 416 through."""

    def __init__(self, path: str, anonymous: bool = False) -> None:
        self._path, self._anonymous = path, anonymous

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, api.NotFound | api.PreconditionFailed | api.RequestRangeNotSatisfiable):
            return
        if isinstance(error, api.GoogleAPICallError):
            raise self._answered(error) from error
        if isinstance(error, google.auth.exceptions.RefreshError):
            raise StorageError(
                f"{self._path}: the credentials were not accepted ({error}); renew them with "
                "`gcloud auth application-default login`."
            ) from error
        if isinstance(error, requests.exceptions.InvalidURL | urllib3.exceptions.LocationValueError):
            raise StorageError(f"{self._path}: {error}; is {EMULATOR} a URL?") from error
        if isinstance(
            error,
            requests.RequestException
            | urllib3.exceptions.HTTPError
            | google.auth.exceptions.TransportError
            | DataCorruption
            | ConnectionError
            | TimeoutError,
        ):
            heart = _heart(error)
            unreachable = isinstance(heart, _NO_CONTACT)
            raise (Unreachable if unreachable else Transient)(_short(heart)) from error

    def _answered(self, error: api.GoogleAPICallError) -> Exception:
        code, text = error.code, (error.message or "").strip().partition("\n")[0][:300]
        damaged = code == 400 and any(word in text.lower() for word in ("crc32c", "md5", "checksum"))
        if code in _TRANSIENT or damaged:
            return Transient(f"status {code}: {text}")
        if code in {401, 403}:
            who = "no credentials were found" if self._anonymous else "these credentials may not"
            return StorageError(
                f"{self._path}: permission denied ({code}; {who}). Grant roles/storage.objectUser on the bucket "
                "(objectViewer to read only), or log in with `gcloud auth application-default login`."
            )
        return StorageError(f"{self._path}: the store refused with status {code}: {text}")


def _heart(error: BaseException) -> BaseException:
    """The fault inside those that requests, urllib3 and google-auth wrap around it."""
    for _ in range(8):
        inner = [getattr(error, "reason", None), *error.args[:1]]
        found = next((e for e in inner if isinstance(e, BaseException)), None)
        if found is None:
            break
        error = found
    return error


def _short(error: BaseException) -> str:
    """One line without urllib3's object and address in front."""
    text = " ".join(str(error).split())
    if text.startswith(("HTTP", "<urllib3")):
        text = text.partition(": ")[2] or text
    text = text.removesuffix(".")
    return f"{type(error).__name__}: {text if len(text) <= _FAULT else text[:_FAULT] + '...'}"


def checksum(data: bytes) -> int:
    """CRC-32C."""
    return int(google_crc32c.value(data))


def announced_checksum(answer: urllib3.BaseHTTPResponse) -> int | None:
    """CRC-32C of the whole object by the header x-goog-hash, where the store says it."""
    for item in answer.headers.get("x-goog-hash", "").split(","):
        name, _, value = item.strip().partition("=")
        if name == "crc32c":
            return crc32c.decoded(value)
    return None


def with_scheme(host: str) -> str:
    """An endpoint as a URL: users write `localhost:4443` as well."""
    return (host if "://" in host else f"http://{host}").rstrip("/")


def point_tensorstore_at(emulator: str | None) -> None:
    """Where only STORAGE_EMULATOR_HOST is set, give TensorStore the same endpoint. It is read whenever a key-value
    store is opened. What a user has set is left alone."""
    if os.environ.get(TENSORSTORE) not in {None, _given.get(TENSORSTORE)}:
        return
    if emulator:
        _given[TENSORSTORE] = os.environ[TENSORSTORE] = with_scheme(emulator)
    else:
        os.environ.pop(TENSORSTORE, None)


_given: dict[str, str] = {}


def _credentials() -> tuple[Any, str | None]:
    try:
        credentials, project = google.auth.default(scopes=[_SCOPE])
    except google.auth.exceptions.DefaultCredentialsError as error:
        if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            raise StorageError(f"GOOGLE_APPLICATION_CREDENTIALS cannot be used: {error}") from error
        return AnonymousCredentials(), None  # public buckets need none; a refusal says that none were found
    return credentials, project
