"""ApiKeys: ASGI middleware that checks API keys and their limits."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http.account import Account, attach
from router.api.http.errors import send_error
from router.errors import ApiError
from router.keys import KeyLimits, KeyRing
from router.keys.attempts import MAX_WAIT_S, FailedAttempts
from router.page.routes import PAGE, PAGE_FILES

OPEN_PATHS = ("/health", "/ready", "/ping", PAGE)
"""Paths that require no API key: probes send none, and the web page prompts its user for one."""
ADMIN_PATHS = ("/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Prefixes of paths whose routes check admin keys themselves. Other spellings of these paths do not
match, and so require an API key."""
SCORE_PATHS = ("/score", "/v1/score")
"""Paths of the scoring API, as in vLLM."""
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
"""Paths of reranking, as in vLLM and in Cohere's APIs."""
LIMITED_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", *SCORE_PATHS, *RERANK_PATHS),
    *("/v1/decisions", "/v1/systemone"),
)
"""Paths whose requests count against a key's limits, since they use workers."""


class ApiKeys:
    """Rejects requests without a valid API key, and creates an account for every other request.

    It does not wrap `send`, so it costs nothing per token.

    Args:
        app: the wrapped application.
        keys: valid API keys.
        limits: usage limits of the keys.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, limits: KeyLimits) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._entries = keys.entries
        self._attempts = FailedAttempts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards an HTTP request or websocket, or responds with 401 or 429."""
        path = scope.get("path", "")
        is_open = path in OPEN_PATHS or path.startswith((PAGE_FILES, *ADMIN_PATHS))
        if scope["type"] == "lifespan" or is_open:
            await self._app(scope, receive, send)
            return
        entry = self._keys.find(scope)
        if self._entries is not self._keys.entries:
            self._entries = self._keys.entries
            self._limits.keep(self._entries)
        if entry is None:
            if scope["type"] == "http":
                error = await failed_attempt(self._attempts, scope, "missing or invalid API key")
                await send_error(send, error, path=path)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        account = Account(self._limits.of(entry), len(self._keys.entries))
        attach(scope, account)
        if path not in LIMITED_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            await account.begin_request()
        except ApiError as error:
            await send_error(send, error, headers=account.headers(), path=path)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            account.end_request()


async def failed_attempt(attempts: FailedAttempts, scope: Scope, problem: str) -> ApiError:
    """Returns the error for a request without a valid key.

    If the client's address has sent many such requests, waits first or returns a 429.
    """
    address = (scope.get("client") or ("", 0))[0]
    delay_s = attempts.delay_s(address, time.monotonic())
    if delay_s is None:
        message = "too many requests without a valid API key: try again later"
        return ApiError(429, message, retry_after_s=int(MAX_WAIT_S))
    if delay_s:
        await asyncio.sleep(delay_s)
    return invalid_key(problem)


def invalid_key(problem: str) -> ApiError:
    """A 401 error with instructions for sending a key."""
    message = f"{problem}: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
    return ApiError(401, message, code="invalid_api_key")
