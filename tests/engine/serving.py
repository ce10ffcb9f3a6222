"""`vllm serve` as a process that can be asked, killed and stopped, and cold engines that say what it should answer."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_files import DATA

TESTS = Path(__file__).parent.parent
ORIGINS = {  # what a version holds -> the same weights as others wrote them: the original model, MaxText's own export
    "original": DATA / "qwen3/hf",
    "trained": DATA / "trained/qwen3-scanned/maxtext_hf_step3",
}
ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 4, "dtype": "bfloat16"}
_ARGUMENTS = [word for key, value in ENGINE.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@dataclass(frozen=True)
class Span:
    """Tokens that one version made, and their log-probabilities (of the likeliest, by id)."""

    version: str
    before: tuple[int, ...]  # prompt and tokens of earlier versions
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def bare_model(folder: Path) -> Path:
    """What a sampler is started from: config and tokenizer, no weights."""
    folder.mkdir()
    for file in (DATA / "qwen3/hf/config.json", *(DATA / "tokenizer").iterdir()):
        shutil.copyfile(file, folder / file.name)
    return folder


class ServerProcess:
    """`MTX2VLLM_WATCH=root vllm serve model`, as a container runs it, in a process group of its own."""

    def __init__(self, model: Path, root: Path, log: Path, *options: str, **environment: str) -> None:
        self.root, self.log = root, log
        self.port, self.metrics_port = free_port(), free_port()
        self.words = [sys.executable, "-m", "engine.serve", str(model), "--port", str(self.port), "--host", "127.0.0.1"]
        self.words += ["--enable-scale-out", *_ARGUMENTS, *options]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, *filter(None, [os.environ.get("PYTHONPATH")])))),
            "MTX2VLLM_WATCH": str(root), "MTX2VLLM_METRICS_PORT": str(self.metrics_port),
            "MTX2VLLM_REPLICA": "sampler", **environment,
        }  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                self.words, stdout=stream, stderr=stream, env={**os.environ, **self.environment}, start_new_session=True
            )

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9 of server, engine core and staging process at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def left(self, within: float = 30.0) -> list[int]:
        """Processes of the group that still live; gigabytes take a moment to be given back, even after kill -9."""
        deadline = time.monotonic() + within
        while (found := self._members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _members(self) -> list[int]:
        assert self.process is not None
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def page(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Status and text; status 0 where nobody listens."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=30)
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""

    def agent_page(self, path: str) -> tuple[int, str]:
        return self.page(path, self.metrics_port)

    def loaded(self) -> int | None:
        """The version that the agent says it has loaded."""
        _, text = self.agent_page("/readyz")
        return json.loads(text).get("loaded") if text else None

    def wait(self, condition: Any, seconds: float, what: str) -> None:
        """Until a condition holds; a server that ends before it is a failure, with its last lines."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.running() or time.monotonic() > deadline:
                raise AssertionError(f"gave up waiting for {what}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def wait_for_server(self, seconds: float = 400) -> None:
        """Until it takes requests (it may hold them back)."""
        self.wait(lambda: self.page("/health")[0] == 200, seconds, "the server")

    def stream(self, prompt: list[int], tokens: int) -> Iterator[dict[str, Any]]:
        """The choices of a streamed greedy generation, as they come. Raises OSError when the server dies."""
        body = {
            "token_ids": prompt, "stream": True,
            "sampling_params": {"temperature": 0, "max_tokens": tokens, "logprobs": 4, "ignore_eos": True, "detokenize": False},
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"{answer.status}: {answer.read().decode()}")
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                chunk = json.loads(text)
                if "choices" not in chunk:
                    raise http.client.HTTPException(text)
                yield from chunk["choices"]


def spans_of(prompt: list[int], choices: list[dict[str, Any]]) -> list[Span]:
    """What a finished stream says, version by version.

    Raises:
        EOFError: the stream ended before the request was finished.
    """
    tokens = [token for choice in choices for token in choice["token_ids"] or []]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    versions = next((choice["weight_versions"] for choice in reversed(choices) if choice.get("weight_versions")), None)
    if versions is None:
        raise EOFError("the stream ended early")
    assert len(entries) == len(tokens)
    logprobs = [{top["token_id"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
    ends = [v["start"] for v in versions[1:]] + [len(tokens)]
    return [
        Span(v["version"], (*prompt, *tokens[: v["start"]]), tuple(tokens[v["start"] : end]), tuple(logprobs[v["start"] : end]))
        for v, end in zip(versions, ends, strict=True)
    ]  # fmt: skip


def differences(
    spans: list[Span], content: Any, more: dict[str, Any] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Spans that are not what a cold engine of their version says, and what else the cold process reports.

    Args:
        content: version -> a key of ORIGINS.
        more: for `engine.cold`.
    """
    questions = [{"content": content(int(s.version)), "before": list(s.before), "tokens": len(s.tokens)} for s in spans]
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "asked.json", Path(folder) / "out.json"
        asked.write_text(json.dumps({"questions": questions, **(more or {})}))
        command = [sys.executable, "-m", "engine.cold", str(asked), str(out)]
        run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1500, check=False)
        if not out.exists():
            raise AssertionError(f"the cold engines failed ({run.returncode})\n{run.stderr[-5000:]}")
        found = json.loads(out.read_text())
    problems = []
    for span, answer in zip(spans, found.pop("answers"), strict=True):
        where = f"version {span.version}, {len(span.tokens)} tokens after {len(span.before)}"
        if list(span.tokens) != answer["tokens"]:
            problems.append(f"{where}: tokens differ")
        elif [{int(i): p for i, p in step.items()} for step in answer["logprobs"]] != list(span.logprobs):
            problems.append(f"{where}: log-probabilities differ")
    return problems, found
