"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import re
import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from router.api import params
from router.api.body import read_body
from router.api.protocol import ChatRequest, CommonRequest, CompletionRequest, parse_body
from router.api.response import GenerationResponse
from router.api.writer import ChatWriter, ResponseWriter, TextWriter
from router.errors import bad_request
from router.fleet import PromptBlocks
from router.gateway import Gateway
from router.serving import GenerationRequest, ServedModel
from worker.wire.sampling import SamplingParams

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class CompletionRoutes:
    """The two routes that generate text."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions. Raises ApiError."""
        body = parse_body(await read_body(request), ChatRequest)
        model = self._gateway.model(body.model)
        sampling = params.sampling_params(body, params.chat_max_tokens(body), model.defaults)
        prompt = await model.encoder.chat(
            params.chat_messages(body.messages),
            cache_salt=params.cache_salt(body),
            add_generation_prompt=body.add_generation_prompt is not False,
            chat_template_kwargs=params.template_arguments(body),
        )
        return _respond(request, body, model, [prompt], sampling, ChatWriter, "chatcmpl")

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions. Raises ApiError."""
        body = parse_body(await read_body(request), CompletionRequest)
        model = self._gateway.model(body.model)
        sampling = params.sampling_params(body, params.completion_max_tokens(body), model.defaults)
        texts = params.completion_prompts(body.prompt)
        params.check_num_completions(len(texts), sampling.n)
        prompts = await model.encoder.prompts(
            texts,
            cache_salt=params.cache_salt(body),
            add_special_tokens=body.add_special_tokens is not False,
        )
        return _respond(request, body, model, prompts, sampling, TextWriter, "cmpl")


def request_id_of(request: Request) -> str:
    """The client's X-Request-Id where it is printable and short, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _respond(
    request: Request,
    body: CommonRequest,
    model: ServedModel,
    prompts: list[PromptBlocks],
    sampling: SamplingParams,
    writer_type: type[ResponseWriter],
    prefix: str,
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
        )
    )
    writer = writer_type(
        generation,
        response_id=f"{prefix}-{request_id}",
        created=int(time.time()),
        model=body.model or model.route.name,
        options=body.stream_options,
        return_token_ids=bool(body.return_token_ids),
    )
    return GenerationResponse(generation, writer, request_id=request_id, stream=bool(body.stream))
