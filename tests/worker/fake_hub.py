"""A Hugging Face Hub of a few repositories on loopback, as far as `snapshot_download` asks."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves folders as repositories.

    Args:
        repositories: folders by ORGANIZATION/NAME; any other name is answered with 404.
        failures: statuses of the first answers that tell a repository's commit.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path], failures: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.failures = list(failures)

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub(repositories: Mapping[str, Path], failures: list[int]) -> Iterator[FakeHub]:
    """One that answers while the block runs."""
    with FakeHub(repositories, failures) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """What a file is."""
        self._answer()

    def do_GET(self) -> None:
        """A repository's commit, its files, or one of them."""
        self._answer()

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        for repository, folder in hub.repositories.items():
            about = f"/api/models/{repository}"
            if path == f"{about}/revision/main":
                if hub.failures:
                    self._send(hub.failures.pop(0), b'{"error": "come again"}', "application/json")
                else:
                    self._send_json({"id": repository, "sha": COMMIT, "siblings": []})
                return
            if path == f"{about}/tree/{COMMIT}":
                self._send_json([_entry(file) for file in sorted(folder.iterdir())])
                return
            if path.startswith(f"/{repository}/resolve/{COMMIT}/"):
                content = (folder / path.rpartition("/")[2]).read_bytes()
                self._send(200, content, "application/octet-stream", etag=_hash(content))
                return
        headers = {"X-Error-Code": "RepoNotFound"}
        self._send(404, b'{"error": "Repository not found"}', "application/json", **headers)

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str, etag: str = "", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if etag:
            self.send_header("etag", f'"{etag}"')
            self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(content), "oid": _hash(content)}


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
