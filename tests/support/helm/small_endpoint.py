"""An endpoint with some models and a one-word answer, for commands that only send requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serve_models(models: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """URL of the endpoint, and the models of the requests in order. Its API key is `secret`."""
    requested_models: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({"data": [{"id": model} for model in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requested_models.append(body["model"])
            self._answer({"usage": {"completion_tokens": 1}, "choices": [{"text": "two"}]})

        def _answer(self, body: dict[str, Any]) -> None:
            let_in = self.path == "/ready" or self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if let_in else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested_models
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
