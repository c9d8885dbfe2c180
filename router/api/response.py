"""Sends a generation over ASGI, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.writer import ResponseWriter
from router.errors import ApiError, overloaded
from router.serving import Completion, Generation
from router.serving.account import explanation_headers

logger = logging.getLogger(__name__)

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class GenerationResponse(Response):
    """ASGI response of a completion request; speaks ASGI itself to spend little per token.

    Args:
        generation: not started yet.
        writer: makes the bytes.
        request_id: sent back as x-request-id.
        stream: server-sent events, or one JSON body at the end.
    """

    def __init__(
        self, generation: Generation, writer: ResponseWriter, *, request_id: str, stream: bool
    ) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._request_id = request_id
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the generation to its end, or to the client's."""
        generation = self._generation
        watcher = asyncio.create_task(_close_on_disconnect(receive, generation))
        problem: str | None = None
        try:
            try:
                await generation.start()
                if self._stream:
                    await self._send_events(send)
                else:
                    await self._send_whole(send)
            except ApiError as error:
                problem = error.message
                await send_error(send, error, self._request_id)
        finally:
            generation.close()
            watcher.cancel()
            if generation.request.span is not None:
                generation.request.span.end(generation, problem or generation.problem)

    async def _send_events(self, send: Send) -> None:
        generation, writer = self._generation, self._writer
        # The head waits for the first news: a request that is refused while it waits at its worker
        # gets its status as any other.
        head: dict[str, object] | None = self._head(EVENT_STREAM)
        pending = writer.first()
        failed: ApiError | None = None
        while not generation.finished:
            body = pending
            for completion in await generation.take():
                if completion.error:
                    failed = failed or _failure(completion)
                else:
                    body += writer.chunk(completion)
            if failed is not None:
                break
            if body:
                pending = b""
                is_first, head = head, None
                if is_first is not None:
                    await send(is_first)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                if is_first is not None:
                    generation.flushed(asyncio.get_running_loop().time())
        end = writer.last()
        if head is not None:
            if failed is not None:
                raise failed
            await send(head)
        if failed is not None:
            # The status has gone out as 200; the error takes the place of the end of the stream.
            end = b"data: " + failed.body() + b"\n\n"
        await send({"type": "http.response.body", "body": pending + end, "more_body": False})

    async def _send_whole(self, send: Send) -> None:
        generation = self._generation
        while not generation.finished:
            for completion in await generation.take():
                if completion.error:
                    raise _failure(completion)
        body = self._writer.whole()
        await send(self._head(JSON, len(body)))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _head(self, content_type: bytes, length: int | None = None) -> dict[str, object]:
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", self._request_id.encode("latin-1")),
            (b"x-rayfleet-worker", self._generation.workers.encode("latin-1")),
        ]
        headers += explanation_headers(self._generation)
        if (span := self._generation.request.span) is not None:
            headers.append((b"traceresponse", span.traceparent.encode()))
        if length is None:
            # Proxies must hand each event on as it comes.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", b"%d" % length))
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _failure(completion: Completion) -> ApiError:
    """What the client is told of a completion that ended by an error."""
    rejection = completion.rejection
    if rejection is not None and rejection.status == 429:
        return overloaded(rejection.message, rejection.retry_after_s)
    if rejection is not None and rejection.status < 500:
        param = completion.spec.feasibility.param(rejection.param)
        return ApiError(rejection.status, rejection.message, param=param)
    return ApiError(500, completion.error or "internal server error")


async def send_error(send: Send, error: ApiError, request_id: str | None = None) -> None:
    """Sends an error as the whole response."""
    body = error.body()
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode("latin-1")))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _close_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()
