"""ResponsesRoutes: OpenAI's Responses API under /v1/responses."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.http.account import account_of
from router.api.http.body import Bodies
from router.api.openai import params
from router.api.openai.completions import (
    CompletionRoutes,
    Prepared,
    ignored_parts,
    request_id_of,
)
from router.api.openai.fields import Ignored
from router.api.openai.logprobs import ChatLogprobs
from router.api.openai.protocol import ChatRequest, parse_body
from router.api.openai.tokenize import encoded_chat
from router.api.openai.values import check_num_values
from router.api.responses.background import BackgroundRun, EventLog
from router.api.responses.chat import NAMES, Turns, chat_of
from router.api.responses.items import Messages, messages_of
from router.api.responses.peers import (
    Operation,
    Outcome,
    ResponseCall,
    ResponsePeers,
    event_stream,
)
from router.api.responses.protocol import KNOWN, ResponsesRequest
from router.api.responses.response import overflow_events
from router.api.responses.store import ResponseStore, Stored
from router.api.responses.tools import ClientTools, client_tools
from router.api.responses.writer import ResponsesWriter
from router.errors import ApiError, bad_request
from router.gateway import Gateway
from router.serving import Generation, ServedModel


class ResponsesRoutes:
    """Handlers of the Responses API.

    Each gateway stores the responses it created, per API key. Requests for a stored response may be
    sent to any gateway (see ResponsePeers).

    Args:
        gateway: the gateway of the models.
        bodies: reads request bodies.
        completions: prepares and runs chats.
    """

    def __init__(self, gateway: Gateway, bodies: Bodies, completions: CompletionRoutes) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._completions = completions
        max_bytes = gateway.config.responses_store_mib << 20
        self._store = ResponseStore(gateway.gateway_id, max_bytes)
        self._running: dict[tuple[str, str], BackgroundRun] = {}
        """Responses that run in the background, by key name and response id."""
        self._peers = ResponsePeers(gateway.peers, self._perform)

    async def create(self, request: Request) -> Response:
        """POST /v1/responses: runs a turn of a conversation. Raises ApiError."""
        account = account_of(request)
        account.request_id = request_id_of(request)
        run = self._gateway.pool.run_if_large
        ignored = ignored_parts(self._gateway, request, "responses")
        async with self._bodies.read(request) as payload:

            def read() -> tuple[ResponsesRequest, ServedModel]:
                body = parse_body(payload, ResponsesRequest, KNOWN, ignored)
                return body, account.permitted(self._gateway, body.model)

            body, model = await run(read, size=len(payload), owner=account.name)
            if body.background and not self._store.is_open:
                raise bad_request(
                    "background: true is not supported, since this server stores no responses "
                    "(--responses-store-mib 0)",
                    "background",
                )
            if body.background and body.store is False:
                raise bad_request("background: true requires store: true", "background")
            before = b"[]"
            if body.previous_response_id is not None:
                before = await self._messages(account.name, body.previous_response_id)
            num_bytes = len(payload) + len(before)
            turn = await run(
                lambda: _turn(body, before, ignored), size=num_bytes, owner=account.name
            )
            chat = turn.chat
            if body.truncation == "auto":
                chat = await _shortened(chat, model, account.name, num_bytes)
            try:
                prepared = await self._completions.prepare(
                    request, lambda: chat, lambda chat: chat, num_bytes=num_bytes, names=NAMES
                )
            except ApiError as error:
                if error.overflow is None or not body.stream or body.background:
                    raise
                events = overflow_events(
                    body,
                    error,
                    response_id=self._store.new_id(),
                    model=body.model or model.route.name,
                )
                return _json(events, account.request_id, "text/event-stream; charset=utf-8")
        return await self._respond(request, body, prepared, turn)

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/ID: a stored response, or its stream replayed. Raises ApiError."""
        query = request.query_params
        after = query.get("starting_after")
        is_stream = query.get("stream", "false").lower() == "true"
        if after is not None and not is_stream:
            raise bad_request("starting_after requires stream: true", "starting_after")
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 16):
            raise bad_request(
                f"starting_after must be the sequence number of an event, got {after[:20]!r}",
                "starting_after",
            )
        number = -1 if after is None else int(after)
        return await self._run(request, "follow" if is_stream else "retrieve", number)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/ID: deletes a response, aborting it if it is running. Raises
        ApiError."""
        return await self._run(request, "delete")

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/ID/cancel: aborts a background response. Raises ApiError."""
        return await self._run(request, "cancel")

    async def _run(self, request: Request, operation: Operation, after: int = -1) -> Response:
        call = ResponseCall(
            operation=operation,
            owner=account_of(request).name,
            response_id=str(request.path_params["response_id"]),
            after=after,
        )
        return (await self._peers.run(call)).response()

    async def _messages(self, owner: str, previous_id: str) -> bytes:
        """Messages of the conversation that a request continues, as JSON. Raises ApiError."""
        call = ResponseCall(
            operation="messages",
            owner=owner,
            response_id=previous_id,
            field="previous_response_id",
        )
        body = (await self._peers.run(call)).body
        assert isinstance(body, bytes)
        return body

    async def _perform(self, call: ResponseCall) -> Outcome:
        """Runs an operation on a response stored by this gateway. Raises ApiError."""
        owner, response_id = call.owner, call.response_id
        run = self._running.get((owner, response_id))
        if call.operation == "follow":
            return Outcome(self._log(call, run).follow(call.after))
        if call.operation == "delete":
            if run is not None:
                await run.cancel()
            self._store.delete(owner, response_id)
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return Outcome(msgspec.json.encode(deleted))
        if call.operation == "cancel":
            if run is None:
                self._store.get(owner, response_id)
                raise bad_request(
                    "only unfinished responses with background: true can be cancelled",
                    "response_id",
                )
            await run.cancel()
        stored = self._store.get(owner, response_id, call.field)
        return Outcome(stored.messages if call.operation == "messages" else stored.response)

    def _log(self, call: ResponseCall, run: BackgroundRun | None) -> EventLog:
        """The events of a streamed background response. Raises ApiError."""
        stored = self._store.get(call.owner, call.response_id)
        if run is not None and run.log is not None:
            return run.log
        if stored.events is None:
            raise bad_request(
                "only responses created with background: true and stream: true can be streamed "
                "again: omit stream",
                "stream",
            )
        return EventLog(self._completions.ping_s, stored.events)

    async def _respond(
        self,
        request: Request,
        body: ResponsesRequest,
        chat: Prepared[ChatRequest],
        turn: _Turn,
    ) -> Response:
        model, owner = chat.checked.model, chat.account.name
        response_id = self._store.new_id()
        sampling = chat.checked.feasibility.sampling
        num_top = params.chat_logprobs(chat.body)
        ended = partial(self._keep, owner, response_id, turn.messages)
        writers: list[ResponsesWriter] = []

        def make_writer(generation: Generation) -> ResponsesWriter:
            writer = ResponsesWriter(
                generation,
                parsing=chat.parsing,
                tokenizer=model.tokenizer,
                response_id=response_id,
                model=body.model or model.route.name,
                body=body,
                dialect=model.dialect,
                tools=turn.tools,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                logprobs=None if num_top is None else ChatLogprobs(model.tokenizer, num_top),
                ended=ended if body.store is not False and self._store.is_open else None,
            )
            writers.append(writer)
            return writer

        response = await self._completions.respond(
            request, chat, make_writer, has_pings=not body.background
        )
        if not body.background:
            return response
        [writer] = writers
        queued = writer.response("queued")
        self._keep(owner, response_id, turn.messages, queued, None)
        log = EventLog(self._completions.ping_s) if body.stream else None
        self._running[owner, response_id] = BackgroundRun(
            response,
            request.scope,
            chat.account,
            writer.failure,
            lambda: self._ended(owner, response_id),
            log,
        )
        if log is not None:
            return event_stream(log.follow(-1), chat.account.request_id)
        return _json(msgspec.json.encode(queued), chat.account.request_id)

    def _ended(self, owner: str, response_id: str) -> None:
        """Stores the stream of a completed background response."""
        log = self._running.pop((owner, response_id)).log
        if log is not None:
            with contextlib.suppress(ApiError):  # deleted or evicted meanwhile
                stored = self._store.get(owner, response_id)
                self._store.put(owner, response_id, replace(stored, events=log.events))

    def _keep(
        self,
        owner: str,
        response_id: str,
        messages: bytes,
        response: dict[str, Any],
        message: dict[str, Any] | None,
    ) -> None:
        """Stores a response and its conversation.

        Args:
            owner: name of the API key.
            response_id: id of the response.
            messages: the conversation before the response, as JSON.
            message: the message that the response adds to the conversation; None if there is none
                yet.
        """
        if message is not None:
            comma = b"," if len(messages) > 2 else b""
            messages = messages[:-1] + comma + msgspec.json.encode(message) + b"]"
        stored = Stored(response=msgspec.json.encode(response), messages=messages)
        self._store.put(owner, response_id, stored)


async def _shortened(
    chat: ChatRequest, model: ServedModel, owner: str, num_bytes: int
) -> ChatRequest:
    """The chat with as many of its last turns as fit into the context length. Raises ApiError
    (429)."""
    info = model.fleet.info
    if info is None:
        return chat
    turns = Turns(chat)
    number = await model.encoder.first_that_fits(
        lambda number: encoded_chat(turns.without(number), model),
        len(turns),
        info.max_model_len - (chat.max_completion_tokens or 1),
        owner=owner,
        num_bytes=num_bytes,
    )
    return turns.without(number)


class _Turn(NamedTuple):
    """A turn of a conversation: a request and the conversation that it continues."""

    chat: ChatRequest
    messages: bytes
    """Messages of the conversation before the response, without `instructions`, as JSON."""
    tools: ClientTools


def _turn(body: ResponsesRequest, before: bytes, ignored: Ignored) -> _Turn:
    """Creates the turn that a body requests.

    Args:
        before: earlier messages, as JSON.
        ignored: counts tools that are ignored.

    Raises:
        ApiError: 400 if the body is malformed.
    """
    check_num_values(before)
    earlier: Messages = msgspec.json.decode(before)
    messages = [*earlier, *messages_of(body.input)]
    tools = client_tools(body.tools, ignored)
    return _Turn(chat_of(body, messages, tools), msgspec.json.encode(messages), tools)


def _json(body: bytes, request_id: str, media_type: str = "application/json") -> Response:
    headers = {"x-request-id": request_id}
    return Response(body, media_type=media_type, headers=headers)
