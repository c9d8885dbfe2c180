"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.key_file import KeyFile, digest_of
from router.api.response import send_error
from router.errors import ApiError

OPEN_PATHS = ("/health", "/ready")
"""Probes carry no key."""


class ApiKeys:
    """ASGI middleware that lets in who presents one of `keys`, or of `key_file`, as a bearer token.

    All keys are compared, each in constant time, so that the time of an answer tells nothing.
    Wraps nothing around `send`: tokens pay nothing for it.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], key_file: KeyFile | None = None) -> None:
        self._app = app
        self._digests = [digest_of(key.encode()) for key in keys]
        self._key_file = key_file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ApiKeys."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._known(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            error = ApiError(
                401,
                "no valid API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
            await send_error(send, error)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _known(self, scope: Scope) -> bool:
        header = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = digest_of(key.strip())
        known = False
        from_file = self._key_file.digests() if self._key_file is not None else ()
        for expected in (*self._digests, *from_file):
            known |= hmac.compare_digest(digest, expected)
        return known and scheme.lower() == b"bearer"
