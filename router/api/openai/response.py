"""GenerationResponse: runs a generation and sends it over ASGI; a disconnect aborts it."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.http.account import Account
from router.api.http.client_streams import ClientStream, ClientStreams
from router.api.http.errors import send_error
from router.api.http.parts import SEND_PART
from router.api.http.slices import SLICE_BYTES
from router.api.openai.blocks import BlockWriter
from router.api.openai.pings import Pings
from router.api.openai.whole import WholeWriter
from router.api.openai.writer import ResponseWriter
from router.errors import ApiError, rejected
from router.serving import Completion, Generation
from router.serving.account import explanation_headers
from router.work_slice import SLICE_S, WorkSlice

logger = logging.getLogger(__name__)

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
PART: dict[str, object] = {"type": "http.response.body", "more_body": True}

StreamWriter = ResponseWriter | BlockWriter
Writer = StreamWriter | WholeWriter
"""A writer that produces a generation's response in the format of an API."""


class GenerationResponse(Response):
    """ASGI response of a completion request; it sends ASGI messages itself to save time per token.

    Args:
        generation: the generation, not started yet.
        writer: writes the response's body.
        request_id: id of the request, sent as x-request-id.
        stream: whether to send server-sent events instead of one JSON body at the end.
        account: account of the request, which is charged for the tokens.
        streams: disconnects clients that do not read their responses.
        has_pings: whether a stream without output is kept alive by pings.
    """

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        *,
        request_id: str,
        stream: bool,
        account: Account,
        streams: ClientStreams,
        has_pings: bool = True,
    ) -> None:
        super().__init__()
        self._streams = streams
        self._generation = generation
        self._writer = writer
        self._request_id = request_id
        self._stream = stream
        self._account = account
        self._has_pings = has_pings
        self._has_head = False
        """Whether the head of the stream has been sent."""
        self._is_flushed = False
        """Whether the first output of the stream has been sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the generation until it ends or the client disconnects."""
        generation = self._generation
        watcher = asyncio.create_task(_close_on_disconnect(receive, generation))
        problem: str | None = None
        try:
            problem = await self._answer(scope, send)
        finally:
            generation.close()
            watcher.cancel()
            self._account.spend_generated(
                generation.num_completion_tokens, generation.num_cached_tokens
            )
            problem = problem or generation.problem
            generation.end_span(problem)
            self._log(problem)

    async def _answer(self, scope: Scope, send: Send) -> str | None:
        """Starts the generation and sends the response.

        Returns the message of the error that was sent instead of the response; None if there was
        none.
        """
        generation = self._generation
        problem: str | None = None
        try:
            if self._stream:
                # The block ends without an exception if the client reads too slowly.
                async with self._streams.watched(send, generation) as stream:
                    problem = await self._send_stream(stream, scope.get(SEND_PART, send))
            else:
                await generation.start()
                self._account.spend_prompt(generation.num_prompt_tokens)
                async with self._streams.watched(send, generation) as stream:
                    await self._send_whole(stream.send)
        except ApiError as error:
            headers = self._account.headers()
            await send_error(send, error, self._request_id, headers=headers, path=scope["path"])
            return error.message
        return problem

    @property
    def _stream_writer(self) -> StreamWriter:
        """The writer of a response that may be streamed."""
        assert not isinstance(self._writer, WholeWriter), "only whole responses have this writer"
        return self._writer

    def _log(self, problem: str | None) -> None:
        """Logs the outcome and the token counts of the request in one line."""
        generation = self._generation
        level = logging.WARNING if problem else logging.INFO
        if not logger.isEnabledFor(level):
            return
        reasons = dict.fromkeys(c.finish_reason or "abort" for c in generation.completions)
        logger.log(
            level,
            "%s: %d prompt tokens, %d cached, %d generated%s",
            ", ".join(reasons),
            generation.num_prompt_tokens,
            generation.num_cached_tokens,
            generation.num_completion_tokens,
            f": {problem}" if problem else "",
            extra={
                "request_id": self._request_id,
                "worker_id": generation.workers,
                "model": self._account.model,
            },
        )

    async def _send_stream(self, stream: ClientStream, send_part: Send) -> str | None:
        """Starts the generation and sends a stream.

        Args:
            stream: the client.
            send_part: sends the parts between the head of the stream and its end.

        Returns:
            The message of an error before the first output; None if there was none.

        Raises:
            ApiError: an error occurred before the head of the stream was sent.
        """
        generation, pings = self._generation, None
        if self._has_pings:
            pings = Pings(lambda: self._send_ping(stream, send_part), self._streams.limits)
        try:
            try:
                await generation.start()
            except ApiError as error:
                if pings is not None:
                    await pings.finish()
                if not self._has_head:
                    raise
                await self._send_end(stream, self._stream_writer.failure(error))
                return error.message
            self._account.spend_prompt(generation.num_prompt_tokens)
            if pings is not None:
                pings.accepted()
            # A separate task: each part of a stream resumes all coroutines of its task, and this
            # one has two dozen, of the server and its middleware.
            await asyncio.create_task(self._send_events(stream, send_part, pings))
        finally:
            if pings is not None:
                pings.close()
        return None

    async def _send_events(
        self, stream: ClientStream, send_part: Send, pings: Pings | None
    ) -> None:
        """Sends the events of a stream (see `_send_stream`)."""
        generation, writer = self._generation, self._stream_writer
        chunk = writer.chunk
        clock = asyncio.get_running_loop().time
        # The head is sent with the first output or ping, so that a request rejected in its worker's
        # queue still gets an error status.
        body = writer.first()
        num_first = len(body)
        failed: ApiError | None = None
        is_ended = generation.finished
        while not is_ended and failed is None:
            if pings is not None:
                pings.is_waiting = True
            completions = await generation.take()
            if pings is not None:
                pings.is_waiting = False
                if pings.task is not None:
                    await pings.finish()
            until = 0.0
            for completion in completions:
                if completion.error is not None:
                    failed = _failure(completion)
                    break
                for part in chunk(completion):
                    if len(body) > num_first:  # a single part takes little time
                        if not until:
                            until = clock() + SLICE_S
                        elif clock() >= until:
                            await asyncio.sleep(0)
                            until = clock() + SLICE_S
                    body += part
                    if len(body) >= SLICE_BYTES:
                        await self._send_part(stream, send_part, body)
                        body, num_first = b"", 0
                if completion.finish_reason is not None:
                    is_ended = generation.finished
            if len(body) > num_first and failed is None and not is_ended:
                await self._send_part(stream, send_part, body)
                body, num_first = b"", 0
                if pings is not None:
                    pings.sent_at = clock()
        if failed is not None and not self._has_head:
            raise failed
        # After a 200 status, errors are sent as the last event of the stream.
        end = writer.last() if failed is None else writer.failure(failed)
        await self._send_end(stream, body + end)

    async def _send_ping(self, stream: ClientStream, send_part: Send) -> None:
        """Sends a ping, after the head of the stream if that has not been sent."""
        body = self._stream_writer.ping()
        await self._send_head(stream)
        stream.begun = message = {**PART, "body": body}
        await send_part(message)
        stream.done = message

    async def _send_part(self, stream: ClientStream, send_part: Send, body: bytes) -> None:
        """Sends a part of the body, after the head of the stream if that has not been sent."""
        if not self._has_head:
            await self._send_head(stream)
        stream.begun = message = {**PART, "body": body}
        await send_part(message)
        stream.done = message
        if not self._is_flushed:
            self._flushed()

    async def _send_end(self, stream: ClientStream, body: bytes) -> None:
        """Sends the end of a stream."""
        await self._send_head(stream)
        await stream.send({"type": "http.response.body", "body": body, "more_body": False})
        if not self._is_flushed:
            self._flushed()

    async def _send_head(self, stream: ClientStream) -> None:
        """Sends the head of a stream, once."""
        if not self._has_head:
            self._has_head = True
            await stream.send(self._head(EVENT_STREAM))

    def _flushed(self) -> None:
        """Records that the first output has been sent."""
        self._is_flushed = True
        self._generation.flushed(asyncio.get_running_loop().time())

    async def _send_whole(self, send: Send) -> None:
        generation = self._generation
        while not generation.finished:
            for completion in await generation.take():
                if completion.error:
                    raise _failure(completion)
        work, body, is_begun = WorkSlice(), bytearray(), False
        for part in self._writer.whole():
            body += part
            if work.is_over:
                await work.next()
                if generation.client_left:
                    return
            if len(body) >= SLICE_BYTES:
                if not is_begun:
                    is_begun = True
                    await send(self._head(JSON))
                await send({**PART, "body": bytes(body)})
                body.clear()
        if not is_begun:
            await send(self._head(JSON, len(body)))
        await send({"type": "http.response.body", "body": bytes(body), "more_body": False})

    def _head(self, content_type: bytes, length: int | None = None) -> dict[str, object]:
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", self._request_id.encode("latin-1")),
            (b"x-rayfleet-worker", self._generation.workers.encode("latin-1")),
        ]
        headers += self._writer.headers
        headers += explanation_headers(self._generation)
        headers += self._account.headers()
        if (span := self._generation.request.span) is not None:
            headers.append((b"traceresponse", span.traceparent.encode()))
        if length is None:
            # Disables buffering of the stream in proxies.
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", b"%d" % length))
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _failure(completion: Completion) -> ApiError:
    """The error to send to the client for a failed completion."""
    rejection = completion.rejection
    if rejection is not None and rejection.status < 500:
        return rejected(rejection, completion.spec.feasibility.param(rejection.param))
    return ApiError(500, completion.error or "internal server error")


async def _close_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.client_left = True
    generation.close()
