"""Logging for all processes: one line per record, as text or JSON, with the request id."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

FILE_VARIABLE = "RAYFLEET_LOG_FILE"
"""Environment variable that names the file to which all processes append their log lines, such as
/proc/1/fd/1 (standard output of a container). Default: standard error of each process."""
FIELDS = ("request_id", "worker_id", "model")
"""Record attributes that callers can set with `extra=`."""


def setup_logging(
    level: str = "INFO", log_format: LogFormat = "text", process: str = "rayfleet"
) -> None:
    """Sends all log records of this process to the file that FILE_VARIABLE names, or to standard
    error.

    `process` identifies the process in every line.
    """
    stream, problem = _stream()
    handler = logging.StreamHandler(stream)
    formatter: logging.Formatter
    formatter = JsonFormatter(process) if log_format == "json" else TextFormatter(process)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if problem is not None:
        logging.getLogger(__name__).warning(problem)


def _stream() -> tuple[TextIO, str | None]:
    """Stream for log lines, and a problem if it is not the configured one.

    HAZARD: in replicas, Ray Serve replaces `sys.stderr` with a stream that wraps each line in a
    record of level INFO, so the original standard error is used.
    """
    problem = None
    if path := os.environ.get(FILE_VARIABLE):
        try:
            return open(path, "a", encoding="utf-8", buffering=1), None
        except OSError as error:
            problem = f"cannot write the log to {path} ({error.strerror}): logging to stderr"
    return sys.__stderr__ or sys.stderr, problem


def log_as(process: str) -> None:
    """Sets up logging as configured by `rayfleet serve`. Child processes inherit
    the configuration."""
    log_format: LogFormat = "json" if os.environ.get("RAYFLEET_LOG_FORMAT") == "json" else "text"
    setup_logging(os.environ.get("RAYFLEET_LOG_LEVEL", "INFO"), log_format, process)


class TextFormatter(logging.Formatter):
    """Formats records as text: `2026-01-31T12:00:00.000Z INFO gateway router.gateway: message
    request_id=...`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Line for a record, followed by the lines of its traceback."""
        line = (
            f"{_timestamp(record)} {record.levelname} {self._process} {record.name}: "
            f"{record.getMessage()}"
        )
        for field, value in _fields(record).items():
            line += f" {field}={value}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Formats records as JSON: one object per record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Line for a record, with its traceback as a field."""
        entry: dict[str, str] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, str]:
    values = {field: getattr(record, field, None) for field in FIELDS}
    return {field: str(value) for field, value in values.items() if value is not None}


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"
