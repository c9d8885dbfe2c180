"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import re
import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from router.api import params
from router.api.body import read_body
from router.api.logprobs import ChatLogprobs, TextLogprobs
from router.api.protocol import ChatRequest, CommonRequest, CompletionRequest, parse_body
from router.api.response import GenerationResponse
from router.api.tenant import tenant_of
from router.api.writer import ChatWriter, Extras, ResponseWriter, TextWriter
from router.errors import bad_request
from router.fleet import PromptBlocks
from router.gateway import Gateway
from router.serving import GenerationRequest, ServedModel
from router.tracing import RequestSpan
from worker.wire.sampling import SamplingParams

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class CompletionRoutes:
    """The two routes that generate text."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions. Raises ApiError."""
        payload = await read_body(request)
        arrived_at = asyncio.get_running_loop().time()
        body = parse_body(payload, ChatRequest)
        model = self._gateway.model(body.model)
        num_top = params.chat_logprobs(body)
        sampling = await _sampling(body, params.chat_max_tokens(body), model, num_top)
        prompt = await model.encoder.chat(
            params.chat_messages(body.messages),
            cache_salt=params.cache_salt(body),
            tenant=self._cache_owner(request, body),
            session=body.prompt_cache_key or "",
            add_generation_prompt=body.add_generation_prompt is not False,
            chat_template_kwargs=params.template_arguments(body),
        )
        extras = Extras(
            tokenizer=model.tokenizer,
            return_token_ids=bool(body.return_token_ids),
            logprobs=None if num_top is None else ChatLogprobs(model.tokenizer, num_top),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        parts = (model, [prompt], sampling, extras)
        return self._respond(request, arrived_at, body, *parts, ChatWriter)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions. Raises ApiError."""
        payload = await read_body(request)
        arrived_at = asyncio.get_running_loop().time()
        body = parse_body(payload, CompletionRequest)
        model = self._gateway.model(body.model)
        echo_only = bool(body.echo) and body.max_tokens == 0
        max_tokens = 1 if echo_only else params.completion_max_tokens(body)
        sampling = await _sampling(body, max_tokens, model, body.logprobs, echo=bool(body.echo))
        texts = params.completion_prompts(body.prompt)
        params.check_num_completions(len(texts), sampling.n)
        prompts = await model.encoder.prompts(
            texts,
            cache_salt=params.cache_salt(body),
            tenant=self._cache_owner(request, body),
            session=body.prompt_cache_key or "",
            add_special_tokens=body.add_special_tokens is not False,
        )
        num_top = body.logprobs
        extras = Extras(
            tokenizer=model.tokenizer,
            return_token_ids=bool(body.return_token_ids),
            logprobs=None if num_top is None else TextLogprobs(model.tokenizer, num_top),
            prompt_logprobs=body.prompt_logprobs is not None,
            echo=await model.encoder.texts(texts) if body.echo else None,
            echo_only=echo_only,
        )
        parts = (model, prompts, sampling, extras)
        return self._respond(request, arrived_at, body, *parts, TextWriter)

    def _cache_owner(self, request: Request, body: CommonRequest) -> str:
        return tenant_of(request, body.user, self._gateway.config.salt_by)

    def _respond(
        self,
        request: Request,
        arrived_at: float,
        body: CommonRequest,
        model: ServedModel,
        prompts: list[PromptBlocks],
        sampling: SamplingParams,
        extras: Extras,
        writer_type: type[ResponseWriter],
    ) -> Response:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is only allowed with stream", "stream_options")
        request_id = request_id_of(request)
        generation = model.generation(
            GenerationRequest(
                request_id=request_id,
                prompts=prompts,
                sampling=sampling,
                stream=bool(body.stream),
                priority=params.priority(body),
                slo=None if body.slo is None or body.slo.is_empty else body.slo,
                tenant=tenant_of(request, body.user, self._gateway.config.fair_by),
                arrived_at=arrived_at,
                span=self._span(request, model, arrived_at),
            )
        )
        writer = writer_type(
            generation,
            response_id=f"{writer_type.prefix}-{request_id}",
            created=int(time.time()),
            model=body.model or model.route.name,
            extras=extras,
            options=body.stream_options,
        )
        return GenerationResponse(
            generation, writer, request_id=request_id, stream=bool(body.stream)
        )

    def _span(self, request: Request, model: ServedModel, arrived_at: float) -> RequestSpan | None:
        if self._gateway.tracing is None:
            return None
        return RequestSpan.begin(
            self._gateway.tracing,
            request.headers.get("traceparent", ""),
            path=request.scope["path"],
            model=model.route.name,
            elapsed_s=asyncio.get_running_loop().time() - arrived_at,
        )


def request_id_of(request: Request) -> str:
    """The client's X-Request-Id where it is printable and short, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


async def _sampling(
    body: CommonRequest,
    max_tokens: int | None,
    model: ServedModel,
    logprobs: int | None,
    *,
    echo: bool = False,
) -> SamplingParams:
    prompt_logprobs = params.prompt_logprobs(body)
    if echo and prompt_logprobs is None:
        prompt_logprobs = logprobs  # what is echoed is told of like what is generated
    sampling = params.sampling_params(
        body, max_tokens, model.defaults, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    return await model.encoder.bad_words(sampling)
