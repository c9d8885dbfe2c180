"""`rayfleet serve --log-format json` prints only JSON lines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys


def test_every_line_is_a_json_object_with_its_level() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["-m", "cluster.cli.main", "serve", "--log-format", "json", "--port", str(port)]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, timeout=120
        )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2
    assert [line["level"] for line in lines] == ["INFO", "ERROR", "INFO"]
    assert f"cannot listen on 127.0.0.1:{port}" in lines[1]["message"]
    assert {line["process"] for line in lines} == {"serve"}
