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
ADMIN_PATHS = "/admin/"
"""What begins so asks for an admin key itself; in any other spelling it needs an API key too."""


class KeyRing:
    """Keys of one kind, as digests: some were given, the rest are in a file.

    All are compared, each in constant time, so that the time of an answer tells nothing.

    Args:
        keys: given.
        path: of the file, or folder of files; empty for none. See KeyFile.

    Raises:
        ValueError: the file cannot be read, or holds no key.
    """

    def __init__(self, keys: Sequence[str], path: str = "") -> None:
        self._digests = [digest_of(key.encode()) for key in keys]
        self._file = KeyFile(path) if path else None

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._digests and self._file is None

    def admits(self, scope: Scope) -> bool:
        """Whether a request presents one of them as a bearer token."""
        header = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = digest_of(key.strip())
        known = False
        from_file = self._file.digests() if self._file is not None else ()
        for expected in (*self._digests, *from_file):
            known |= hmac.compare_digest(digest, expected)
        return known and scheme.lower() == b"bearer"


class ApiKeys:
    """ASGI middleware that lets in who presents one of `keys`.

    Wraps nothing around `send`: tokens pay nothing for it.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ApiKeys."""
        path = scope.get("path", "")
        is_open = scope["type"] == "lifespan" or path in OPEN_PATHS or path.startswith(ADMIN_PATHS)
        if is_open or self._keys.admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send_error(send, invalid_key("no valid API key"))
        else:
            await send({"type": "websocket.close", "code": 1008})


def invalid_key(problem: str) -> ApiError:
    """A 401 that says how keys are presented."""
    message = f"{problem}: send it as `Authorization: Bearer KEY`"
    return ApiError(401, message, code="invalid_api_key")
