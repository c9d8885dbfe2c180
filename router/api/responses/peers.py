"""ResponsePeers: operations on stored responses, run by the gateway that created the response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.responses import Response, StreamingResponse

from router.api.responses.store import gateway_of, response_gone
from router.errors import ApiError
from router.peers import Peers
from worker.protocol.analyzed import analyzed

METHOD = "responses"

Operation = Literal["retrieve", "follow", "delete", "cancel", "messages"]
"""Operations on a stored response: `retrieve` returns it, `follow` its events, and `messages` its
conversation, which a new response continues."""


class ResponseCall(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on a stored response."""

    operation: Operation
    owner: str
    """Name of the API key, already checked by the gateway that received the request."""
    response_id: str
    after: int = -1
    """Number of the last event that the client has received, for `follow`."""
    field: str | None = None
    """Body field that contains the id, named in errors; None if the id is in the path."""


class _Head(msgspec.Struct, frozen=True):
    """First item of the reply: the outcome of the operation. The other items are the body."""

    status: int = 200
    message: str = ""
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an operation: a complete body, or the parts of a stream."""

    body: bytes | AsyncIterator[bytes]

    def response(self) -> Response:
        """The HTTP response with this result."""
        if isinstance(self.body, bytes):
            return Response(self.body, media_type="application/json")
        return event_stream(self.body)


class ResponsePeers:
    """Sends each operation to the gateway whose id is part of the response's id.

    That gateway runs the operation for the request's API key: responses of other keys are not
    found, regardless of the gateway that the client uses.

    Args:
        peers: the gateways of the fleet.
        perform: runs an operation on this gateway. Raises ApiError.
    """

    def __init__(self, peers: Peers, perform: Callable[[ResponseCall], Awaitable[Outcome]]) -> None:
        self._peers = peers
        self._perform = perform
        peers.handle_stream(METHOD, self._handle)

    async def run(self, call: ResponseCall) -> Outcome:
        """Runs an operation on this or another gateway.

        Raises:
            ApiError: the operation failed; 404 if the response's gateway has exited; 503 if it
                cannot be reached.
        """
        gateway_id = gateway_of(call.response_id)
        if gateway_id is None or gateway_id == self._peers.own_id:
            return await self._perform(call)
        if gateway_id not in self._peers.ids:
            raise response_gone(call.response_id, call.field)
        items = self._peers.stream(gateway_id, METHOD, msgspec.msgpack.encode(call))
        try:
            head = msgspec.msgpack.decode(await anext(items), type=analyzed(_Head))
            if head.status != 200:
                raise ApiError(
                    head.status,
                    head.message,
                    param=head.param,
                    code=head.code,
                    retry_after_s=head.retry_after_s,
                )
            if call.operation == "follow":
                return Outcome(items)
            return Outcome(b"".join([item async for item in items]))
        except (ConnectionError, StopAsyncIteration) as error:
            if gateway_id not in self._peers.ids:
                raise response_gone(call.response_id, call.field) from error
            raise ApiError(
                503,
                "the gateway that stores this response is unreachable: try again",
                code="gateway_unreachable",
                retry_after_s=1,
            ) from error

    async def _handle(self, payload: bytes) -> AsyncIterator[bytes]:
        """Runs an operation for another gateway."""
        call = msgspec.msgpack.decode(payload, type=analyzed(ResponseCall))
        try:
            outcome = await self._perform(call)
        except ApiError as error:
            yield msgspec.msgpack.encode(
                _Head(error.status, error.message, error.param, error.code, error.retry_after_s)
            )
            return
        yield msgspec.msgpack.encode(_Head())
        if isinstance(outcome.body, bytes):
            yield outcome.body
            return
        async with aclosing(outcome.body) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield part


def event_stream(parts: AsyncIterator[bytes], request_id: str | None = None) -> Response:
    """A response that streams server-sent events."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if request_id is not None:
        headers["x-request-id"] = request_id
    return StreamingResponse(parts, media_type="text/event-stream", headers=headers)
