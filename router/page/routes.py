"""PageRoutes: the page at / and its files. They are public; the fleet's data requires a key."""

from __future__ import annotations

import hashlib
import html
from importlib.resources import files
from pathlib import PurePath
from typing import Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE: Final = "/"
"""Path of the page."""
PAGE_FILES: Final = "/ui/"
"""Prefix of the paths of the page's files."""
CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'self'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
"""Headers of each response. They forbid content from other hosts, inline scripts and styles,
parsing of strings as HTML or scripts, and framing by other sites."""
_BASE: Final = b'<base href="./">'


class PageRoutes:
    """Handlers of the page, whose files are read once.

    Args:
        root_path: prefix that a reverse proxy adds to all paths; empty if there is none.
    """

    def __init__(self, root_path: str = "") -> None:
        folder = files("router.page") / "static"
        self._files = {
            file.name: _File.of(file.name, file.read_bytes()) for file in folder.iterdir()
        }
        page = self._files.pop("index.html").body
        if root_path:  # relative URLs need the trailing slash
            base = f'<base href="{html.escape(root_path)}/">'
            page = page.replace(_BASE, base.encode())
        self._page = _File.of("index.html", page)

    async def page(self, request: Request) -> Response:
        """GET /: the page."""
        return self._page.answer(request)

    async def file(self, request: Request) -> Response:
        """GET /ui/NAME: a file of the page."""
        file = self._files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return file.answer(request)


class _File(NamedTuple):
    """A file as served to browsers."""

    body: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, name: str, body: bytes) -> _File:
        """Creates a file with its headers; the name's suffix determines the content type."""
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        kind = CONTENT_TYPES[PurePath(name).suffix]
        return cls(body, {**HEADERS, "content-type": kind, "etag": tag})

    def answer(self, request: Request) -> Response:
        """The response with the file, or 304 if the browser has cached it."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)
