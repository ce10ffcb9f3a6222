"""Log lines of a long-running command: text for people, one JSON object a line for collectors."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_PLAIN = frozenset(vars(logging.makeLogRecord({})))  # what every record has; the rest are our facts


def configure(style: str, stream: TextIO | None = None) -> None:
    """Send what `mtx2vllm` logs to stderr; other packages' lines only from warnings on."""
    target = logging.StreamHandler(stream or sys.stderr)
    target.setFormatter(_Json() if style == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [target]
    root.setLevel(logging.WARNING)
    logging.getLogger("mtx2vllm").setLevel(logging.INFO)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname.lower():<7} {record.getMessage()}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        facts |= {key: value for key, value in vars(record).items() if key not in _PLAIN and key != "message"}
        if record.exc_info:
            facts["trace"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)
