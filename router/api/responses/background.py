"""A response that goes on without its client, who comes back for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.types import Message, Scope

from router.api.account import Account
from router.api.response import GenerationResponse
from router.errors import ApiError


class BackgroundRun:
    """Runs a response to its end; counts as an open request of its key for as long.

    Args:
        response: not started yet, and not streamed.
        scope: of the request that asked for it.
        account: of that request.
        failed: is called with the error where one ends it.
        ended: is called last.
    """

    def __init__(
        self,
        response: GenerationResponse,
        scope: Scope,
        account: Account,
        failed: Callable[[ApiError], object],
        ended: Callable[[], object],
    ) -> None:
        self._response = response
        self._account = account
        self._failed = failed
        self._ended = ended
        self._leave = asyncio.Event()
        self._status = 200
        account.is_held = True
        self._task = asyncio.create_task(self._run(scope))

    async def cancel(self) -> None:
        """Ends it, and waits until it has ended."""
        self._leave.set()
        await asyncio.wait([self._task])

    async def _run(self, scope: Scope) -> None:
        try:
            await self._response(scope, self._receive, self._send)
        except Exception:
            self._failed(ApiError(500, "internal server error"))
            raise
        finally:
            self._account.end()
            self._ended()

    async def _receive(self) -> Message:
        """Its client has left when it is cancelled, not before."""
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Nobody reads it: the writer keeps what it has written. Errors come as bodies."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status >= 400:
            error = msgspec.json.decode(message["body"])["error"]
            self._failed(ApiError(self._status, error["message"]))
