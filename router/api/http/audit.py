"""AuditLog: a line per HTTP request with client, key, model, tokens and status, but no text."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.http.account import account_of
from router.private_files import RotatedFile

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset(("/health", "/ready", "/metrics"))
"""Paths that are not logged, as probes and scrapers request them several times a second."""
MAX_BYTES = 256 * 2**20
"""Maximum size in bytes of the log file, and of the previous one: about a million requests each."""
MAX_PATH = 200
"""Maximum length of a logged path in characters; longer paths, which clients may send, are cut off.
"""


class AuditLog:
    """ASGI middleware that writes a line of JSON per request to FOLDER/audit-GATEWAY.jsonl.

    The latest 512 MiB of files from exited gateways are kept. The client is the address in the ASGI
    scope, which the server's middleware takes from X-Forwarded-For of trusted proxies.

    Args:
        app: the wrapped application, which must include ApiKeys.
        folder: folder of the log; created if it does not exist.
        gateway_id: id of this gateway.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, app: ASGIApp, folder: str, gateway_id: str) -> None:
        self._app = app
        path = Path(folder) / f"audit-{gateway_id}.jsonl"
        try:
            self._file = RotatedFile(path, max_bytes=MAX_BYTES, buffering=1, others="audit-*.jsonl")
        except OSError as error:
            raise ValueError(
                f"--audit-log: cannot write to {folder}: {error.strerror or error}"
            ) from error
        self._fails = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request, and writes its line once the response has been sent."""
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self._write(self._line(Request(scope), status, time.monotonic() - began))

    def _line(self, request: Request, status: int, elapsed_s: float) -> dict[str, Any]:
        account = account_of(request)
        return {
            "time": round(time.time() - elapsed_s, 3),
            "duration_s": round(elapsed_s, 3),
            "client": request.client.host if request.client is not None else "",
            "key": account.name,
            "method": request.method[:MAX_PATH],
            "path": request.scope["path"][:MAX_PATH],
            "status": status,
            "request_id": account.request_id,
            "model": account.model,
            "prompt_tokens": account.prompt_tokens,
            "cached_tokens": account.cached_tokens,
            "generated_tokens": account.generated_tokens,
        }

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.append(msgspec.json.encode(line))
        except OSError as error:
            # A full disk must not fail requests. The error is logged once until writes succeed.
            if not self._fails:
                logger.error("cannot write the audit log: %s", error)
            self._fails = True
        else:
            self._fails = False
