"""A starting Prometheus refuses connections, then answers 503; tests handle both."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.deploy.prometheus_binaries import wait_until_ready


class StartingPrometheus(BaseHTTPRequestHandler):
    """Ready at the third request."""

    num_requests = 0

    def do_GET(self) -> None:
        type(self).num_requests += 1
        is_ready = type(self).num_requests > 2
        self.send_response(200 if is_ready else 503)
        self.end_headers()
        self.wfile.write(b"Ready.\n" if is_ready else b"Service Unavailable")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as running:
        yield running
        assert running.stdin is not None
        running.stdin.close()


def test_a_503_is_waited_out(process: subprocess.Popen[bytes]) -> None:
    StartingPrometheus.num_requests = 0
    with HTTPServer(("127.0.0.1", 0), StartingPrometheus) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wait_until_ready(f"http://127.0.0.1:{server.server_port}", process, 60)
        server.shutdown()
    assert StartingPrometheus.num_requests == 3


def test_one_that_ends_or_never_gets_ready_is_reported(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(AssertionError, match="not ready: ConnectError"):
        wait_until_ready("http://127.0.0.1:9", process, 0.0)
    process.kill()
    process.wait()
    with pytest.raises(AssertionError, match="ended with code -9"):
        wait_until_ready("http://127.0.0.1:9", process, 60)
