"""TokenRoutes: POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.http.account import Account, account_of
from router.api.http.body import Bodies, Payload
from router.api.openai import params
from router.api.openai.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest, parse_body
from router.errors import bad_request
from router.gateway import Gateway
from router.serving import ServedModel
from router.tokens.encoder import ChatPrompt

Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


class TokenRoutes:
    """Handlers of /tokenize and /detokenize, which run in the gateway.

    Prompts may exceed the model's context length, since clients use these routes to find out how
    long a prompt is.

    Args:
        gateway: the gateway of the models.
        bodies: reads request bodies.
    """

    def __init__(self, gateway: Gateway, bodies: Bodies) -> None:
        self._gateway = gateway
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: token ids of a prompt or a chat. Raises ApiError."""
        account = account_of(request)
        async with self._bodies.read(request) as payload:
            body, model = await self._read(payload, TokenizeRequest, account)
            return _answer(await self._tokens(body, model, account.name, len(payload)))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids. Raises ApiError."""
        account = account_of(request)
        async with self._bodies.read(request) as payload:
            body, model = await self._read(payload, DetokenizeRequest, account)
            text = await model.encoder.text(body.tokens, owner=account.name)
            return _answer({"prompt": text})

    async def _read(
        self, payload: Payload, kind: type[Body], account: Account
    ) -> tuple[Body, ServedModel]:
        """Decodes a body and finds its model. Raises ApiError if the body is invalid or the key may
        not use the model."""
        body = await self._gateway.pool.run_if_large(
            lambda: parse_body(payload, kind), size=len(payload), owner=account.name
        )
        return body, account.permitted(self._gateway, body.model)

    async def _tokens(
        self, body: TokenizeRequest, model: ServedModel, owner: str, num_bytes: int
    ) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("set either prompt or messages", "prompt")
        if body.prompt is not None:
            add_special_tokens = body.add_special_tokens is not False
            ids = await model.encoder.tokens(
                body.prompt, owner=owner, add_special_tokens=add_special_tokens
            )
        else:
            prompt = await self._gateway.pool.run_if_large(
                lambda: _chat(body, model), size=num_bytes, owner=owner
            )
            ids = await model.encoder.tokens(prompt, owner=owner, num_bytes=num_bytes)
        info = model.fleet.info
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": None if info is None else info.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            found["token_strs"] = await self._gateway.pool.run_if_large(
                lambda: [model.tokenizer.token(token_id) for token_id in ids],
                size=64 * len(ids),
                owner=owner,
            )
        return found


def encoded_chat(chat: ChatRequest, model: ServedModel) -> ChatPrompt:
    """The prompt of a chat before rendering, as in /v1/chat/completions. Raises ApiError."""
    prompt, _ = params.chat_prompt(chat, model.dialect, model.tokenizer.chat_template)
    return prompt


def _chat(body: TokenizeRequest, model: ServedModel) -> ChatPrompt:
    """The prompt of a chat in a body of /tokenize. Raises ApiError."""
    chat = ChatRequest(
        messages=body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return encoded_chat(chat, model)


def _answer(found: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(found), media_type="application/json")
