"""A Hugging Face Hub with a few repositories on loopback, as far as `snapshot_download` needs
it."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REVISION = re.compile(r"/api/models/([^/]+/[^/]+)/(?:revision|tree)/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^/]+)")


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves folders as repositories.

    Args:
        repositories: folders by ORGANIZATION/NAME; other names return 404.
        failures: statuses of the first responses to requests for a repository's commit.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path], failures: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.failures = list(failures)
        self.revisions = {"main": COMMIT}
        """Commits by branch or tag, which tests may move; each has the same files."""
        self.requested: list[str] = []
        """Requested revisions of all repositories."""

    @property
    def url(self) -> str:
        """Value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub(repositories: Mapping[str, Path], failures: list[int]) -> Iterator[FakeHub]:
    """A hub that runs until the end of the block."""
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
        """Metadata of a file."""
        self._answer()

    def do_GET(self) -> None:
        """A repository's commit, its files, or one of them."""
        self._answer()

    def log_message(self, *_: object) -> None:
        """Disables logging."""

    def _answer(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        match = _REVISION.fullmatch(path) or _FILE.fullmatch(path)
        folder = hub.repositories.get(match[1]) if match is not None else None
        if match is None or folder is None:
            self._send_error("RepoNotFound")
            return
        hub.requested.append(match[2])
        commit = hub.revisions.get(match[2], match[2])
        if not re.fullmatch("[0-9a-f]{40}", commit):
            self._send_error("RevisionNotFound")
        elif "/resolve/" in path:
            content = (folder / match[3]).read_bytes()
            self._send(200, content, "application/octet-stream", commit, etag=_hash(content))
        elif "/tree/" in path:
            self._send_json([_entry(file) for file in sorted(folder.iterdir())])
        elif hub.failures:
            self._send(hub.failures.pop(0), b'{"error": "come again"}', "application/json")
        else:
            self._send_json({"id": match[1], "sha": commit, "siblings": []})

    def _send_error(self, code: str) -> None:
        self._send(404, b'{"error": "not found"}', "application/json", **{"X-Error-Code": code})

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), "application/json")

    def _send(
        self,
        status: int,
        body: bytes,
        kind: str,
        commit: str = "",
        etag: str = "",
        **headers: str,
    ) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if etag:
            self.send_header("etag", f'"{etag}"')
            self.send_header("x-repo-commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(content), "oid": _hash(content)}


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
