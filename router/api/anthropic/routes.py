"""AnthropicRoutes: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.anthropic.chat import NAMES, chat_of, prompt_of
from router.api.anthropic.protocol import COUNTED, KNOWN, CountTokensRequest, MessagesRequest
from router.api.anthropic.writer import AnthropicWriter
from router.api.http.account import account_of
from router.api.http.body import Bodies
from router.api.openai.completions import CompletionRoutes, ignored_parts, request_id_of
from router.api.openai.protocol import parse_body
from router.api.openai.tokenize import encoded_chat
from router.errors import renamed
from router.gateway import Gateway
from router.serving import ServedModel
from router.tokens.encoder import ChatPrompt


class AnthropicRoutes:
    """Handlers of Anthropic's Messages API; the header `anthropic-version` is ignored.

    Args:
        gateway: the gateway of the models.
        bodies: reads request bodies.
        completions: prepares and runs chats.
    """

    def __init__(self, gateway: Gateway, bodies: Bodies, completions: CompletionRoutes) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._completions = completions

    async def create(self, request: Request) -> Response:
        """POST /v1/messages: runs a chat. Raises ApiError."""
        ignored = ignored_parts(self._gateway, request, "messages")
        async with self._bodies.read(request) as payload:
            chat = await self._completions.prepare(
                request,
                lambda: parse_body(payload, MessagesRequest, KNOWN, ignored),
                partial(chat_of, ignored=ignored),
                num_bytes=len(payload),
                names=NAMES,
            )
            model, request_id = chat.checked.model, chat.account.request_id
            writer = partial(
                AnthropicWriter,
                parsing=chat.parsing,
                tokenizer=model.tokenizer,
                response_id=f"msg_{request_id}",
                model=chat.body.model or model.route.name,
                request_id=request_id,
            )
            return await self._completions.respond(request, chat, writer)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: token count of the rendered prompt. Raises ApiError."""
        account = account_of(request)
        account.request_id = request_id_of(request)
        ignored = ignored_parts(self._gateway, request, "messages")
        async with self._bodies.read(request) as payload:

            def read() -> tuple[ServedModel, ChatPrompt]:
                body = parse_body(payload, CountTokensRequest, COUNTED, ignored)
                model = account.permitted(self._gateway, body.model)
                with renamed(NAMES):
                    return model, encoded_chat(prompt_of(body, ignored), model)

            model, prompt = await self._gateway.pool.run_if_large(
                read, size=len(payload), owner=account.name
            )
            with renamed(NAMES):
                tokens = await model.encoder.tokens(
                    prompt, owner=account.name, num_bytes=len(payload)
                )
        found = msgspec.json.encode({"input_tokens": len(tokens)})
        headers = {"request-id": account.request_id}
        return Response(found, media_type="application/json", headers=headers)
