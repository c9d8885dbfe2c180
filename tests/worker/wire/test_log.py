from __future__ import annotations

import json
import logging

from worker.wire.log import JsonFormatter, TextFormatter


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
