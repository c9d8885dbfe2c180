from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from worker.protocol.log import FILE_VARIABLE, JsonFormatter, TextFormatter


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("router.x", logging.INFO, __file__, 1, "took %d", (3,), None)
    made.__dict__.update(extra)
    return made


def test_json_lines_carry_the_request_id() -> None:
    entry = json.loads(JsonFormatter("gateway").format(record(request_id="r-1")))
    assert (entry["message"], entry["request_id"], entry["process"]) == ("took 3", "r-1", "gateway")
    assert "worker_id" not in entry


def test_text_lines_carry_it_too() -> None:
    line = TextFormatter("gateway").format(record(request_id="r-1", worker_id="w0"))
    assert line.endswith("INFO gateway router.x: took 3 request_id=r-1 worker_id=w0")


LOGS_AS_IN_A_REPLICA = """
import io, logging, os, sys
from worker.protocol.log import log_as
{before}
sys.stderr = io.StringIO()  # Serve's replicas wrap it
log_as("gateway")
logging.getLogger("router.x").warning("lost %s", "it")
"""


def run_logging(before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOGS_AS_IN_A_REPLICA.format(before=before)],
        env={**os.environ, "RAYFLEET_LOG_FORMAT": "json", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def entries(text: str) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["level"], line["process"], line["message"]) for line in lines]


def test_a_line_keeps_its_level_where_serve_has_replaced_stderr() -> None:
    assert entries(run_logging().stderr) == [("WARNING", "gateway", "lost it")]


def test_lines_go_to_the_standard_output_of_a_container() -> None:
    """In a container, its path is /proc/1/fd/1."""
    name = f"os.environ['{FILE_VARIABLE}'] = f'/proc/{{os.getpid()}}/fd/1'"
    done = run_logging(name)
    assert (entries(done.stdout), done.stderr) == ([("WARNING", "gateway", "lost it")], "")


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        run_logging(**{FILE_VARIABLE: str(path)})
    assert entries(path.read_text()) == [("WARNING", "gateway", "lost it")] * 2


def test_lines_are_kept_where_the_file_cannot_be_opened(tmp_path: Path) -> None:
    done = run_logging(**{FILE_VARIABLE: str(tmp_path / "missing" / "log")})
    problem, line = entries(done.stderr)
    assert "No such file or directory" in problem[2]
    assert line == ("WARNING", "gateway", "lost it")
