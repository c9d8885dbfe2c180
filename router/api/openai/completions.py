"""CompletionRoutes: POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.api.http.account import Account, account_of
from router.api.http.body import Bodies, Payload
from router.api.http.client_streams import ClientStreams
from router.api.http.session_id import session_id
from router.api.openai import params
from router.api.openai.fields import Ignored
from router.api.openai.logprobs import ChatLogprobs, TextLogprobs
from router.api.openai.message_writer import MessageWriter
from router.api.openai.protocol import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    StreamOptions,
    parse_body,
)
from router.api.openai.response import GenerationResponse, Writer
from router.api.openai.tools import OutputParsing, ToolUse
from router.api.openai.writer import ChatWriter, Extras, ResponseWriter, TextWriter
from router.errors import bad_request, raise_for_problem, renamed
from router.fleet import Feasibility, PromptBlocks
from router.gateway import Gateway
from router.serving import Generation, GenerationRequest, ServedModel
from router.tokens.encoder import ChatPrompt
from router.tracing import RequestSpan
from worker.protocol.sampling import SamplingParams
from worker.protocol.slo import Slo
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.truncation import Truncation

LAST_TOKENS = 32
"""Number of tokens at the end of the prompt that are searched for a marker that starts reasoning.
"""
Body = TypeVar("Body", bound=CommonRequest)
EMPTY: Mapping[str, str] = MappingProxyType({})
NamesModel = TypeVar("NamesModel", bound="_NamesModel")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class _NamesModel(Protocol):
    """A decoded body of any API that has a `model` field."""

    @property
    def model(self) -> str | None:
        """The model name in the request; None selects the only model."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedParams:
    """The validated fields of a body, except its prompt."""

    model: ServedModel
    feasibility: Feasibility
    """Sampling parameters, and the check of the request against the workers' limits."""
    cache_salt: str
    priority: int
    """Scheduling priority, within what the API key allows."""
    slo: Slo | None
    options: StreamOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(Generic[Body]):
    """A validated request with its encoded prompts."""

    body: Body
    account: Account
    arrived_at: float
    """Arrival time on the event loop's clock."""
    checked: CheckedParams
    prompts: list[PromptBlocks]
    parsing: OutputParsing | None = None
    """How reasoning and tool calls are parsed; None for plain text."""


class CompletionRoutes:
    """Handlers of /v1/chat/completions and /v1/completions; other APIs build on them.

    All fields of a body are validated before its prompt is rendered, tokenized and hashed. A
    request that no worker can ever run is rejected before anything is cached, counted or reserved
    for it.

    Args:
        gateway: the gateway of the models.
        bodies: reads request bodies.
        streams: disconnects clients that do not read their responses.
    """

    def __init__(self, gateway: Gateway, bodies: Bodies, streams: ClientStreams) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._streams = streams

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions: generates answers to a chat. Raises ApiError."""
        ignored = ignored_parts(self._gateway, request, "chat")
        async with self._bodies.read(request) as payload:
            chat = await self.prepare(
                request,
                lambda: parse_body(payload, ChatRequest, ignored=ignored),
                lambda body: body,
                num_bytes=len(payload),
            )
        body, tokenizer = chat.body, chat.checked.model.tokenizer
        by_id = bool(body.return_tokens_as_token_ids)
        num_top = params.chat_logprobs(body)
        if num_top is not None and body.logprob_token_ids:
            num_top = len(body.logprob_token_ids)
        extras = Extras(
            tokenizer=tokenizer,
            return_token_ids=bool(body.return_token_ids),
            logprobs=None if num_top is None else ChatLogprobs(tokenizer, num_top, by_id=by_id),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        kind: Callable[..., ResponseWriter] = ChatWriter
        if chat.parsing is not None:
            kind = partial(MessageWriter, parsing=chat.parsing)
        return await self.respond(request, chat, _writer(kind, ChatWriter.prefix, chat, extras))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions: generates continuations of prompts. Raises ApiError."""
        async with self._bodies.read(request) as payload:
            return await self._complete(request, payload)

    async def prepare(
        self,
        request: Request,
        read: Callable[[], NamesModel],
        chat_of: Callable[[NamesModel], ChatRequest],
        *,
        num_bytes: int,
        names: Mapping[str, str] = EMPTY,
    ) -> Prepared[ChatRequest]:
        """Validates a chat request and encodes its prompt.

        Args:
            request: the HTTP request.
            read: decodes the body; runs in a thread if the body is large, as does `chat_of`.
            chat_of: converts the body to a chat; called if the API key may use the model.
            num_bytes: size of the body in bytes.
            names: the client's field names where they differ from ChatRequest's.

        Raises:
            ApiError: a field is invalid (reported under the client's name), or no worker can run
                the chat now.
        """
        arrived_at = asyncio.get_running_loop().time()
        account = self._account(request)
        body, model, chat, use = await self._gateway.pool.run_if_large(
            partial(self._read_chat, account, read, chat_of, names),
            size=num_bytes,
            owner=account.name,
        )
        with renamed(names):
            checked = await self._check_params(
                body,
                model,
                account,
                params.chat_max_tokens(body),
                params.chat_logprobs(body),
                form=use.form if use.is_forced or not _has_form(body) else None,
                names=names,
            )
            prompt = await model.encoder.chat(
                chat,
                checked.feasibility,
                owner=account.name,
                num_bytes=num_bytes,
                cache_salt=checked.cache_salt,
                tenant=account.tenant(body.user, self._gateway.config.tenants.cache_isolation),
                session=_session(request, body, account),
                adapter=await model.adapter(account.adapter),
                last=body.truncate_prompt_tokens,
            )
        prompt.has_tools = bool(body.tools)
        begun = chat.messages[-1]["content"] if chat.continues else ""
        parsing = _parsing(body, model, use, prompt, begun)
        return Prepared(
            body=body,
            account=account,
            arrived_at=arrived_at,
            checked=_thinking(checked, parsing, body.thinking_token_budget),
            prompts=[prompt],
            parsing=parsing,
        )

    def _read_chat(
        self,
        account: Account,
        read: Callable[[], NamesModel],
        chat_of: Callable[[NamesModel], ChatRequest],
        names: Mapping[str, str],
    ) -> tuple[ChatRequest, ServedModel, ChatPrompt, ToolUse]:
        """A chat's body, model, prompt before rendering, and use of tools."""
        given = read()
        model = account.permitted(self._gateway, given.model)
        body = chat_of(given)
        with renamed(names):
            template = model.tokenizer.chat_template
            return body, model, *params.chat_prompt(body, model.dialect, template)

    async def _complete(self, request: Request, payload: Payload) -> Response:
        arrived_at = asyncio.get_running_loop().time()
        account = self._account(request)

        def read() -> tuple[CompletionRequest, ServedModel, list[str | list[int]]]:
            body = parse_body(payload, CompletionRequest)
            model = account.permitted(self._gateway, body.model)
            return body, model, params.completion_prompts(body.prompt)

        body, model, texts = await self._gateway.pool.run_if_large(
            read, size=len(payload), owner=account.name
        )
        params.check_echo(body)
        echo_only = bool(body.echo) and body.max_tokens == 0
        max_tokens = 1 if echo_only else params.completion_max_tokens(body)
        checked = await self._check_params(
            body,
            model,
            account,
            max_tokens,
            body.logprobs,
            num_prompts=len(texts),
            echo=bool(body.echo),
        )
        prompts = await model.encoder.prompts(
            texts,
            checked.feasibility,
            owner=account.name,
            cache_salt=checked.cache_salt,
            tenant=account.tenant(body.user, self._gateway.config.tenants.cache_isolation),
            session=_session(request, body, account),
            adapter=await model.adapter(account.adapter),
            add_special_tokens=body.add_special_tokens is not False,
            truncation=_truncation(body),
        )
        num_top, by_id = body.logprobs, bool(body.return_tokens_as_token_ids)
        extras = Extras(
            tokenizer=model.tokenizer,
            return_token_ids=bool(body.return_token_ids),
            logprobs=None
            if num_top is None
            else TextLogprobs(model.tokenizer, num_top, by_id=by_id),
            prompt_logprobs=body.prompt_logprobs is not None,
            echo=await model.encoder.texts(
                texts,
                owner=account.name,
                add_special_tokens=body.add_special_tokens is not False,
                skip_special_tokens=checked.feasibility.sampling.skip_special_tokens,
                with_offsets=num_top is not None,
                is_whole=echo_only,
            )
            if body.echo
            else None,
            echo_only=echo_only,
        )
        prepared = Prepared(
            body=body, account=account, arrived_at=arrived_at, checked=checked, prompts=prompts
        )
        writer = _writer(TextWriter, TextWriter.prefix, prepared, extras)
        return await self.respond(request, prepared, writer, with_offsets=num_top is not None)

    async def _check_params(
        self,
        body: ChatRequest | CompletionRequest,
        model: ServedModel,
        account: Account,
        max_tokens: int | None,
        logprobs: int | None,
        *,
        num_prompts: int = 1,
        echo: bool = False,
        form: StructuredOutputsParams | None = None,
        names: Mapping[str, str] = EMPTY,
    ) -> CheckedParams:
        """Validates all fields except the prompt.

        Args:
            body: the body of the request.
            model: the requested model.
            account: the account of the request.
            max_tokens: maximum tokens per completion; None for up to the model's context length.
            logprobs: number of top tokens to return per token; None to omit log-probabilities.
            num_prompts: number of prompts.
            echo: whether prompts are echoed.
            form: structured output required by tools; None if there is none.
            names: the client's field names where they differ from those of `body`.

        Raises:
            ApiError: a field is invalid, or the API key does not allow its value.
        """
        names = {**params.client_names(body), **names}
        if form is not None:
            names["structured_outputs"] = "tools"
        prompt_logprobs = params.prompt_logprobs(body)
        if echo and prompt_logprobs is None:
            prompt_logprobs = logprobs  # echoed tokens are reported like generated ones
        options = params.stream_options(body)
        priority = account.priority(body.priority)
        slo = account.slo(body.slo)
        sampling = params.sampling_params(
            body,
            model.defaults,
            names=names,
            vocab_size=model.vocab_size,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            form=form,
        )
        params.check_num_completions(num_prompts, sampling)
        feasibility = _feasible(model, sampling, names)
        if sampling.bad_words:
            sampling = await model.encoder.bad_words(sampling)
            feasibility = _feasible(model, sampling, names)
            params.check_num_completions(num_prompts, sampling)  # bad words are tokenized by now
        return CheckedParams(
            model=model,
            feasibility=feasibility,
            cache_salt=body.cache_salt or "",
            priority=priority,
            slo=slo,
            options=options,
        )

    def _account(self, request: Request) -> Account:
        account = account_of(request)
        account.request_id = request_id_of(request)
        return account

    async def respond(
        self,
        request: Request,
        prepared: Prepared[Body],
        make_writer: Callable[[Generation], Writer],
        *,
        with_offsets: bool = False,
        has_pings: bool = True,
    ) -> GenerationResponse:
        """Creates the response to a request; sending it runs the generation.

        Args:
            request: the HTTP request.
            prepared: the validated request.
            make_writer: creates the response's writer.
            with_offsets: whether the response has text offsets of tokens.
            has_pings: whether a stream without output is kept alive by pings.
        """
        account, body, checked = prepared.account, prepared.body, prepared.checked
        model = checked.model
        generation = await model.generation(
            GenerationRequest(
                request_id=account.request_id,
                prompts=prepared.prompts,
                feasibility=checked.feasibility,
                stream=bool(body.stream),
                priority=checked.priority,
                slo=checked.slo,
                shown_tokens=model.dialect.special if prepared.parsing else frozenset(),
                with_offsets=with_offsets,
                tenant=account.tenant(body.user, self._gateway.config.tenants.fairness_key),
                arrived_at=prepared.arrived_at,
                span=self._span(request, model, prepared.arrived_at),
            )
        )
        return GenerationResponse(
            generation,
            make_writer(generation),
            request_id=account.request_id,
            stream=bool(body.stream),
            account=account,
            streams=self._streams,
            has_pings=has_pings,
        )

    @property
    def ping_s(self) -> float:
        """Seconds of silence between pings of a stream."""
        return self._streams.limits.ping_s

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
    """The client's X-Request-Id if it is printable and short; otherwise a new id."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _truncation(body: CompletionRequest) -> Truncation | None:
    maximum = body.truncate_prompt_tokens
    return None if maximum is None else Truncation(maximum, "left")


def _session(request: Request, body: CommonRequest, account: Account) -> str:
    return session_id(request.headers, body.user, body.prompt_cache_key, account.name)


def _writer(
    kind: Callable[..., ResponseWriter], prefix: str, prepared: Prepared[Body], extras: Extras
) -> Callable[[Generation], ResponseWriter]:
    """A factory for the writer of an OpenAI completion response."""
    return partial(
        kind,
        response_id=f"{prefix}-{prepared.account.request_id}",
        created=int(time.time()),
        model=prepared.body.model or prepared.checked.model.route.name,
        extras=extras,
        options=prepared.checked.options,
    )


def ignored_parts(gateway: Gateway, request: Request, api: str) -> Ignored:
    """Creates the handler of a request's ignored parts, which counts them.

    Unknown fields are also ignored if the client uses beta features of an API, since these add
    fields.

    Args:
        request: the HTTP request.
        api: name of the API in the metrics.
    """
    is_beta = any(name in request.headers for name in ("anthropic-beta", "openai-beta"))
    return Ignored(partial(gateway.http.ignored.add, api), is_beta)


def _parsing(
    body: ChatRequest, model: ServedModel, use: ToolUse, prompt: PromptBlocks, begun: str
) -> OutputParsing | None:
    """How reasoning and tool calls are parsed; None for plain text, which needs no parsing.

    Args:
        body: the body of the chat.
        use: use of tools.
        prompt: the encoded prompt.
        begun: the assistant message that the model continues; empty if there is none.
    """
    dialect = model.dialect
    thoughts, is_thinking = dialect.thoughts, False
    if thoughts is not None:
        last = memoryview(prompt.token_ids).cast("i")[-LAST_TOKENS:].tolist()
        end = model.tokenizer.decode(last, skip_special_tokens=False).rstrip()
        is_thinking = dialect.opens_thought(end, begun)
        if use.form is not None or _has_form(body):
            # Without reasoning before it, all of the text is structured output.
            is_disabled = dialect.has_opened_thoughts and body.add_generation_prompt is not False
            has_ended = begun or end.endswith(thoughts.closing) or is_disabled
            if dialect.thought_tokens is None or (has_ended and not is_thinking):
                thoughts, is_thinking = None, False
    if use.format is None and thoughts is None:
        return None
    return OutputParsing(
        dialect=replace(dialect, thoughts=thoughts),
        use=use,
        is_thinking=is_thinking,
        shows_thoughts=params.shows_reasoning(body),
    )


def _has_form(body: ChatRequest) -> bool:
    """Whether the client requests structured output."""
    return body.structured_outputs is not None or body.response_format not in (
        None,
        {"type": "text"},
    )


def _thinking(
    checked: CheckedParams, parsing: OutputParsing | None, budget: int | None
) -> CheckedParams:
    """The parameters, extended with those that the model's reasoning format requires.

    Structured output and reasoning budgets require the tokens that delimit reasoning; free text
    requires the format's stop tokens.

    Args:
        checked: the parameters.
        parsing: how reasoning is parsed; None if it is not.
        budget: maximum number of reasoning tokens; None if there is no maximum.
    """
    sampling = checked.feasibility.sampling
    if parsing is None or parsing.dialect.thoughts is None:
        return checked
    changes: dict[str, object] = {}
    if sampling.structured_outputs is None:
        stops = tuple({*sampling.stop_token_ids, *parsing.dialect.stop_token_ids})
        if len(stops) != len(sampling.stop_token_ids):
            changes["stop_token_ids"] = stops
    if budget is not None and sampling.max_tokens is not None:
        budget = budget if budget + 1 < sampling.max_tokens else None  # it would end anyway
    tokens = parsing.dialect.thought_tokens
    if tokens is not None and (sampling.structured_outputs is not None or budget is not None):
        changes["thought"] = msgspec.structs.replace(
            tokens, is_open=parsing.is_thinking, budget=budget
        )
    if not changes:
        return checked
    return replace(checked, feasibility=checked.feasibility.amended(**changes))


def _feasible(
    model: ServedModel, sampling: SamplingParams, names: Mapping[str, str]
) -> Feasibility:
    """Checks sampling parameters against the workers' limits; returns the check for prompts.

    Raises:
        ApiError: 400 if no worker supports the sampling parameters, or a worker has rejected the
            grammar.
    """
    feasibility = Feasibility(sampling, names)
    raise_for_problem(feasibility.parameters(model.fleet.limits))
    message = model.rejected_grammars.find(sampling.structured_outputs)
    if message is not None:
        raise bad_request(message, feasibility.param("structured_outputs"))
    return feasibility
