"""Logs: one line an event, with named fields, never any of the audio."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

logger = logging.getLogger("mimo_tokenizer_server")


def configure_logging(level: str, log_format: str) -> None:
    """Send this package's logs to standard error, as `log_format` ("text" or "json") says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def log(level: int, message: str, **fields: Any) -> None:
    """Log `message` with named fields."""
    logger.log(level, message, extra={"fields": fields})


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, message, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{_time(record)}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    """The same for people: fields behind the message as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_plain(value)}" for key, value in getattr(record, "fields", {}).items())
        line = f"{_time(record)} {record.levelname:<7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}"


def _plain(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and all(c.isprintable() and c not in ' "=' for c in text) else json.dumps(text)
