"""AuditLog: a line per HTTP request, with key, model, tokens and status, and no text."""

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
"""Paths that are not logged: probes and scrapers request them several times a second."""
MAX_BYTES = 256 * 2**20
"""Most bytes of the log file, and as many of the one before: some million requests."""
MAX_PATH = 200
"""Most characters of a path that are logged, since clients choose paths."""


class AuditLog:
    """ASGI middleware that writes a line of JSON per request to FOLDER/audit-GATEWAY.jsonl.

    Of gateways that have ended the latest files are kept, 512 MiB of them.

    Args:
        app: the application within, which must include ApiKeys.
        folder: folder of the log; made if it does not exist.
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
            raise ValueError(f"--audit-log {folder}: {error}") from error
        self._fails = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, and writes its line when it has been answered."""
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
            # A full disk must not fail requests. The error is logged once until a write succeeds.
            if not self._fails:
                logger.error("the audit log cannot be written: %s", error)
            self._fails = True
        else:
            self._fails = False
