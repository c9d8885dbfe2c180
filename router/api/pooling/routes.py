"""PoolingRoutes: POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /v1/rerank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request

from router.api.http.account import Account, account_of
from router.api.http.body import Bodies
from router.api.openai import params
from router.api.openai.completions import CheckedParams, CompletionRoutes, Prepared, request_id_of
from router.api.openai.fields import KnownFields
from router.api.openai.protocol import CommonRequest, parse_body
from router.api.openai.response import GenerationResponse
from router.api.openai.whole import WholeWriter
from router.api.pooling.pairs import check_num_prompts, pairs_of
from router.api.pooling.protocol import (
    COHERE,
    COHERE_PREFIXES,
    KNOWN,
    ClassifyRequest,
    CohereEmbedRequest,
    CohereFormat,
    EmbeddingRequest,
    InputRequest,
    PairRequest,
    PooledRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from router.api.pooling.writer import (
    ClassWriter,
    CohereWriter,
    PooledWriter,
    RerankWriter,
    Response,
    ScoreWriter,
    VectorWriter,
)
from router.errors import bad_request, raise_for_problem, renamed
from router.fleet import Feasibility
from router.gateway import Gateway
from router.serving import Generation, ServedModel
from router.tokens.encoder import Prompt
from worker.protocol.messages import EngineInfo
from worker.protocol.pooling import PoolingInfo, PoolingParams
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.truncation import Side, Truncation

Body = TypeVar("Body", bound=PooledRequest)
Inputs = TypeVar("Inputs", bound=InputRequest)
Pairing = TypeVar("Pairing", bound=PairRequest)
T = TypeVar("T")
_INPUT = {"prompt": "input"}
_DOCUMENTS = {"prompt": "documents"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read(Generic[Body]):
    """A decoded body with its account and model."""

    request: Request
    body: Body
    account: Account
    model: ServedModel
    info: PoolingInfo
    feasibility: Feasibility
    arrived_at: float
    num_bytes: int
    """Size of the body in bytes."""


class PoolingRoutes:
    """Handlers of the routes of pooling models.

    Their requests go through the same admission, placement, retries and metrics as completions.
    Models that generate text are rejected with 400.

    Args:
        gateway: the gateway of the models.
        bodies: reads request bodies.
        completions: runs generations.
    """

    def __init__(self, gateway: Gateway, bodies: Bodies, completions: CompletionRoutes) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._completions = completions

    async def embed(self, request: Request) -> GenerationResponse:
        """POST /v1/embeddings: embeddings as in OpenAI's API. Raises ApiError."""

        def params_of(body: EmbeddingRequest) -> PoolingParams:
            return PoolingParams(dimensions=body.dimensions, normalize=body.normalize)

        read = await self._read(request, EmbeddingRequest, params_of, _INPUT)
        _check_task(read.info, "embed", "/v1/embeddings")
        prefix = _prefix(read.info, read.body.prompt_name)
        encoding = read.body.encoding_format or "float"
        return await self._inputs(
            read,
            lambda generation, response: VectorWriter(
                generation, response, kind="embedding", name="embedding", encoding=encoding
            ),
            prefix=prefix,
        )

    async def embed_cohere(self, request: Request) -> GenerationResponse:
        """POST /v2/embed: embeddings as in Cohere's API. Raises ApiError."""

        def params_of(body: CohereEmbedRequest) -> PoolingParams:
            return PoolingParams(dimensions=body.output_dimension)

        names = {"prompt": "texts", "dimensions": "output_dimension"}
        read = await self._read(request, CohereEmbedRequest, params_of, names, COHERE)
        read = replace(read, body=_truncating(read.body))
        _check_task(read.info, "embed", "/v2/embed")
        texts = read.body.texts
        if not texts:
            raise bad_request("texts must not be empty", "texts")
        check_num_prompts(len(texts), "texts")
        kinds = list(dict.fromkeys(read.body.embedding_types or ("float",)))
        _check_packable(kinds, read.body.output_dimension or read.info.size)
        prefix = _cohere_prefix(read.info, read.body.input_type)
        prompts = await self._run(read, lambda: [prefix + text for text in texts])
        return await self._respond(
            read,
            prompts,
            lambda generation, response: CohereWriter(
                generation, response, texts=texts, kinds=kinds
            ),
            add_special_tokens=True,
        )

    async def pool(self, request: Request) -> GenerationResponse:
        """POST /pooling: embeddings, or logits of labels. Raises ApiError."""

        def params_of(body: PoolingRequest) -> PoolingParams:
            return PoolingParams(dimensions=body.dimensions, normalize=body.normalize)

        read = await self._read(request, PoolingRequest, params_of, _INPUT)
        encoding = read.body.encoding_format or "float"
        return await self._inputs(
            read,
            lambda generation, response: VectorWriter(
                generation, response, kind="pooling", name="data", encoding=encoding
            ),
        )

    async def classify(self, request: Request) -> GenerationResponse:
        """POST /classify: the most likely label of each text. Raises ApiError."""
        read = await self._read(request, ClassifyRequest, _no_params, _INPUT)
        _check_task(read.info, "classify", "/classify")
        use_activation = read.body.use_activation is not False
        return await self._inputs(
            read,
            lambda generation, response: ClassWriter(
                generation, response, use_activation=use_activation
            ),
        )

    async def score(self, request: Request) -> GenerationResponse:
        """POST /score: scores of pairs of texts. Raises ApiError."""
        read = await self._read(request, ScoreRequest, _no_params, _DOCUMENTS)
        body = read.body
        first = _texts(body.text_1, body.queries, ("text_1", "queries"))
        second = _texts(body.text_2, body.documents, ("text_2", "documents"))
        first, second = await self._shortened(read, first, second)
        pairs = await self._run(read, lambda: pairs_of(read.info, first, second, body.instruction))
        return await self._respond(
            read,
            pairs.prompts,
            lambda generation, response: ScoreWriter(generation, response, pairs.indices),
            add_special_tokens=pairs.add_special_tokens,
        )

    async def rerank(self, request: Request) -> GenerationResponse:
        """POST /v1/rerank: documents by relevance to a query. Raises ApiError."""
        read = await self._read(request, RerankRequest, _no_params, _DOCUMENTS)
        body = read.body

        def work() -> list[str]:
            return [item if isinstance(item, str) else item.text for item in body.documents]

        texts = await self._run(read, work)
        first, second = await self._shortened(read, [body.query], texts)
        pairs = await self._run(read, lambda: pairs_of(read.info, first, second, body.instruction))
        shown = None if body.return_documents is False else texts
        return await self._respond(
            read,
            pairs.prompts,
            lambda generation, response: RerankWriter(
                *(generation, response, pairs.indices),
                documents=shown,
                top_n=body.top_n or len(texts),
            ),
            add_special_tokens=pairs.add_special_tokens,
        )

    async def _read(
        self,
        request: Request,
        kind: type[Body],
        params_of: Callable[[Body], PoolingParams],
        names: Mapping[str, str],
        known: KnownFields = KNOWN,
    ) -> _Read[Body]:
        """Decodes a body and validates all fields but its texts.

        Args:
            request: the HTTP request.
            kind: type of the body.
            params_of: pooling parameters of a body.
            names: the client's field names where they differ from those of SamplingParams.
            known: fields of the API that are not supported.

        Raises:
            ApiError: a field is invalid, no worker is available, or the model generates text.
        """
        arrived_at = asyncio.get_running_loop().time()
        account = account_of(request)
        account.request_id = request_id_of(request)
        async with self._bodies.read(request) as payload:
            body = await self._gateway.pool.run_if_large(
                lambda: parse_body(payload, kind, known), size=len(payload), owner=account.name
            )
        model = account.permitted(self._gateway, body.model)
        info: EngineInfo = await model.ready_info()
        sampling = SamplingParams(pooling=params_of(body))
        feasibility = Feasibility(sampling, names)
        raise_for_problem(feasibility.parameters(model.fleet.limits))
        assert info.pooling is not None, "a model that generates text is rejected"
        return _Read(
            request=request,
            body=body,
            account=account,
            model=model,
            info=info.pooling,
            feasibility=feasibility,
            arrived_at=arrived_at,
            num_bytes=len(payload),
        )

    async def _run(self, read: _Read[Body], work: Callable[[], T]) -> T:
        """Runs work on the texts of a body, in a thread if the body is large."""
        pool, owner = self._gateway.pool, read.account.name
        return await pool.run_if_large(work, size=read.num_bytes, owner=owner)

    async def _shortened(
        self, read: _Read[Pairing], first: list[str], second: list[str]
    ) -> tuple[list[str], list[str]]:
        """Queries and documents, each truncated to the request's maximum. Raises ApiError."""
        check_num_prompts(max(len(first), len(second)), "documents")
        encoder, owner = read.model.encoder, read.account.name
        if maximum := read.body.max_tokens_per_query:
            first = await encoder.shortened(first, maximum, owner=owner)
        if maximum := read.body.max_tokens_per_doc:
            second = await encoder.shortened(second, maximum, owner=owner)
        return first, second

    async def _inputs(
        self,
        read: _Read[Inputs],
        make_writer: Callable[[Generation, Response], PooledWriter],
        *,
        prefix: str = "",
    ) -> GenerationResponse:
        """The response for a body with one vector per input; the prefix is prepended to texts."""

        def work() -> Sequence[Prompt]:
            with renamed(_INPUT):
                inputs: Sequence[Prompt] = params.completion_prompts(read.body.input)
            check_num_prompts(len(inputs), "input")
            if not prefix:
                return inputs
            return [prefix + one if isinstance(one, str) else one for one in inputs]

        inputs = await self._run(read, work)
        special = read.body.add_special_tokens is not False
        return await self._respond(read, inputs, make_writer, add_special_tokens=special)

    async def _respond(
        self,
        read: _Read[Body],
        prompts: Sequence[Prompt],
        make_writer: Callable[[Generation, Response], WholeWriter],
        *,
        add_special_tokens: bool,
    ) -> GenerationResponse:
        """Encodes the prompts and creates the response; sending it runs the generation."""
        account, body, model = read.account, read.body, read.model
        tenants = self._gateway.config.tenants
        checked = CheckedParams(
            model=model,
            feasibility=read.feasibility,
            cache_salt=body.cache_salt or "",
            priority=account.priority(body.priority),
            slo=account.slo(body.slo),
        )
        encoded = await model.encoder.prompts(
            prompts,
            read.feasibility,
            owner=account.name,
            cache_salt=checked.cache_salt,
            tenant=account.tenant(body.user, tenants.cache_isolation),
            add_special_tokens=add_special_tokens,
            truncation=_truncation(body, model.encoder.max_prompt_tokens),
        )
        prepared = Prepared(
            body=CommonRequest(user=body.user),
            account=account,
            arrived_at=read.arrived_at,
            checked=checked,
            prompts=encoded,
        )
        response = Response(
            response_id=f"embd-{account.request_id}",
            model=body.model or model.route.name,
            info=read.info,
        )
        return await self._completions.respond(
            read.request, prepared, lambda generation: make_writer(generation, response)
        )


def _no_params(_: PooledRequest) -> PoolingParams:
    return PoolingParams()


def _truncation(body: PooledRequest, longest: int) -> Truncation | None:
    """The requested truncation; None if none is requested. Raises ApiError (400) for an invalid
    maximum.

    Args:
        longest: maximum tokens of a prompt.
    """
    number = body.truncate_prompt_tokens
    if number is None:
        return None
    if not (number == -1 or 1 <= number <= longest):
        raise bad_request(
            f"truncate_prompt_tokens must be in [1, {longest}], or -1 (the maximum), got {number}",
            "truncate_prompt_tokens",
        )
    return Truncation(longest if number == -1 else number, body.truncation_side or "right")


def _check_task(info: PoolingInfo, task: str, route: str) -> None:
    """Raises ApiError (400) if the model does not support the task of this route."""
    if info.task != task:
        others = "/classify, /score or /v1/rerank" if task == "embed" else "/v1/embeddings"
        raise bad_request(f"this model does not support {route}: use {others}", "model")


def _prefix(info: PoolingInfo, name: str | None) -> str:
    """The prompt prefix with this name; the default prefix for None. Raises ApiError (400) if the
    model has no prefix with this name."""
    prompts = dict(info.prompts)
    if name is None:
        return prompts.get(info.default_prompt, "")
    if name not in prompts:
        hint = f"choose from {', '.join(prompts)}" if prompts else "this model has none, omit it"
        raise bad_request(f"unknown prompt_name {name!r}: {hint}", "prompt_name")
    return prompts[name]


def _cohere_prefix(info: PoolingInfo, input_type: str | None) -> str:
    """The prefix for an input type of Cohere's API. Raises ApiError (400) if the type is neither
    Cohere's nor the name of a prefix."""
    prompts = dict(info.prompts)
    if input_type is None:
        return _prefix(info, None)
    if input_type not in prompts and input_type not in COHERE_PREFIXES:
        known = ", ".join(dict.fromkeys((*prompts, *COHERE_PREFIXES)))
        raise bad_request(f"unknown input_type {input_type!r}: choose from {known}", "input_type")
    names = (input_type, *COHERE_PREFIXES.get(input_type, ()))
    return _prefix(info, next((name for name in names if name in prompts), None))


def _truncating(body: CohereEmbedRequest) -> CohereEmbedRequest:
    """The body with vLLM's truncation fields set according to `truncate`."""
    if body.truncate == "NONE" or body.truncate_prompt_tokens is not None:
        return body
    side: Side = "left" if body.truncate == "START" else "right"
    return msgspec.structs.replace(body, truncate_prompt_tokens=-1, truncation_side=side)


def _check_packable(kinds: Sequence[CohereFormat], size: int) -> None:
    """Raises ApiError (400) for binary vectors unless their size is a multiple of 8."""
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(kinds):
        raise bad_request(
            f"embedding_types binary and ubinary require a multiple of 8 dimensions, got {size}",
            "embedding_types",
        )


def _texts(
    first: str | list[str] | None, second: str | list[str] | None, names: tuple[str, str]
) -> list[str]:
    """The texts of one of two synonymous fields. Raises ApiError (400) unless exactly one is
    set."""
    given = first if second is None else second
    if given is None or (first is not None and second is not None):
        raise bad_request(f"set exactly one of {names[0]} and {names[1]}", names[0])
    return [given] if isinstance(given, str) else given
