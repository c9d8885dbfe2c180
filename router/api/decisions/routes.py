"""DecisionRoutes: POST /v1/decisions and /v1/systemone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from router.api.decisions import openai, systemone
from router.api.decisions.labels import NOT_IMPLEMENTED, LabelTokens, chat_of
from router.api.decisions.protocol import KNOWN, AskRequest, DecisionRequest, SystemOneRequest
from router.api.decisions.questions import Question, Reading
from router.api.decisions.writer import DecisionWriter, Usage
from router.api.http.account import Account, account_of
from router.api.http.body import Bodies
from router.api.http.session_id import session_id
from router.api.openai.completions import CheckedParams, CompletionRoutes, Prepared, request_id_of
from router.api.openai.protocol import CommonRequest, parse_body
from router.api.openai.response import GenerationResponse
from router.errors import ApiError, raise_for_problem, renamed
from router.fleet import Feasibility, PromptBlocks
from router.gateway import Gateway
from router.serving import ServedModel
from router.tokens.encoder import ChatPrompt
from worker.protocol.sampling import SamplingParams

Body = TypeVar("Body", bound=AskRequest)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked(Generic[Body]):
    """A decoded body with its account, model and questions."""

    body: Body
    account: Account
    model: ServedModel
    arrived_at: float
    num_bytes: int
    """Size of the body in bytes."""
    state: str
    """What the questions are about."""
    questions: Sequence[Question]

    @property
    def name(self) -> str:
        """Model name in the response."""
        return self.body.model or self.model.route.name


class DecisionRoutes:
    """Handlers of the routes for decisions, which read the probabilities of label tokens.

    Each question is a completion of one token. All prompts of a request begin with the same text,
    which is prefilled once. Questions go through the same admission, placement, retries and metrics
    as other completions.

    Args:
        gateway: the gateway of the models.
        bodies: reads request bodies.
        completions: runs generations.
    """

    def __init__(self, gateway: Gateway, bodies: Bodies, completions: CompletionRoutes) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._completions = completions

    async def decide(self, request: Request) -> GenerationResponse:
        """POST /v1/decisions: answers questions about an input, as in OpenAI's API. Raises
        ApiError."""

        def questions(body: DecisionRequest) -> tuple[str, Sequence[Question]]:
            return openai.state_of(body.input), [*map(openai.question_of, body.questions)]

        asked = await self._read(request, DecisionRequest, questions)

        def body(readings: Sequence[Reading], usage: Usage) -> dict[str, Any]:
            pairs = zip(asked.body.questions, readings, strict=True)
            answers = [openai.answer(question, reading) for question, reading in pairs]
            return {"model": asked.name, "answers": answers, "usage": usage}

        return await self._respond(request, asked, body, {"prompt": "input"})

    async def systemone(self, request: Request) -> GenerationResponse:
        """POST /v1/systemone: answers questions about a state, as in TypeSafe's API. Raises
        ApiError."""

        def questions(body: SystemOneRequest) -> tuple[str, Sequence[Question]]:
            asked = [systemone.question_of(name, one) for name, one in body.questions.items()]
            return systemone.state_of(body.state), asked

        asked = await self._read(request, SystemOneRequest, questions)
        head = {
            "id": f"decision-{asked.account.request_id}",
            "object": "structured_decision",
            "created": int(time.time()),
            "model": asked.name,
        }

        def body(readings: Sequence[Reading], usage: Usage) -> dict[str, Any]:
            by_name = dict(zip(asked.body.questions, readings, strict=True))
            return {
                **head,
                "answers": {
                    name: systemone.answer(asked.body.questions[name], reading)
                    for name, reading in by_name.items()
                },
                "usage": {name: usage[name] for name in ("input_tokens", "output_tokens")},
                "diagnostics": {
                    name: systemone.diagnostics(reading) for name, reading in by_name.items()
                },
            }

        return await self._respond(
            request,
            asked,
            body,
            {"prompt": "state"},
            instructions=asked.body.instructions,
            arguments=asked.body.chat_template_kwargs,
        )

    async def _read(
        self,
        request: Request,
        kind: type[Body],
        questions_of: Callable[[Body], tuple[str, Sequence[Question]]],
    ) -> _Asked[Body]:
        """Decodes a body; `questions_of` returns its state and questions.

        Raises:
            ApiError: a field is invalid, no worker is available, or the model does not generate
                text token by token.
        """
        arrived_at = asyncio.get_running_loop().time()
        account = account_of(request)
        account.request_id = request_id_of(request)

        async with self._bodies.read(request) as payload:

            def read() -> tuple[Body, ServedModel, str, Sequence[Question]]:
                body = parse_body(payload, kind, KNOWN)
                model = account.permitted(self._gateway, body.model)
                return body, model, *questions_of(body)

            body, model, state, questions = await self._gateway.pool.run_if_large(
                read, size=len(payload), owner=account.name
            )
        info = await model.ready_info()
        raise_for_problem(Feasibility(SamplingParams(), {}).parameters(model.fleet.limits))
        if info.block_size > 1:
            raise ApiError(
                NOT_IMPLEMENTED,
                "decisions are not supported for block-diffusion models: use an autoregressive one",
                param="model",
            )
        return _Asked(
            body=body,
            account=account,
            model=model,
            arrived_at=arrived_at,
            num_bytes=len(payload),
            state=state,
            questions=questions,
        )

    async def _respond(
        self,
        request: Request,
        asked: _Asked[Body],
        write: Callable[[Sequence[Reading], Usage], dict[str, Any]],
        names: Mapping[str, str],
        *,
        instructions: str | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> GenerationResponse:
        """Encodes a prompt per question and creates the response; sending it runs the completions.

        Args:
            request: the HTTP request.
            asked: the decoded body.
            write: creates the response's body.
            names: the client's field names where they differ from those of SamplingParams.
            instructions: system message; None if there is none.
            arguments: variables of the chat template; None if there are none.

        Raises:
            ApiError: a field is invalid, or no worker can run one of the completions.
        """
        account, body, model = asked.account, asked.body, asked.model

        def read() -> tuple[LabelTokens, Sequence[Sequence[Sequence[int]]]]:
            tokens = LabelTokens(model, partial(chat_of, model, None, arguments))
            return tokens, [tokens.of(question) for question in asked.questions]

        with renamed({"messages": names["prompt"]}):
            tokens, labels = await self._gateway.pool.run_if_large(
                read, size=asked.num_bytes, owner=account.name
            )
        every = {token_id for options in labels for ids in options for token_id in ids}
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            logprob_token_ids=tuple(sorted(every)),
        )
        feasibility = Feasibility(sampling, names)
        raise_for_problem(feasibility.parameters(model.fleet.limits))
        checked = CheckedParams(
            model=model,
            feasibility=feasibility,
            cache_salt=body.cache_salt or "",
            priority=account.priority(body.priority),
            slo=account.slo(body.slo),
        )
        make_chat = partial(chat_of, model, instructions, arguments)
        with renamed({"messages": names["prompt"]}):
            prompts = await self._prompts(request, asked, checked, make_chat)
        tokens.check(prompts)
        prepared = Prepared(
            body=CommonRequest(user=body.user),
            account=account,
            arrived_at=asked.arrived_at,
            checked=checked,
            prompts=prompts,
        )
        return await self._completions.respond(
            request, prepared, lambda generation: DecisionWriter(generation, labels, write)
        )

    async def _prompts(
        self,
        request: Request,
        asked: _Asked[Body],
        checked: CheckedParams,
        make_chat: Callable[[str], ChatPrompt],
    ) -> list[PromptBlocks]:
        """The encoded prompts of the questions; `make_chat` creates a chat from a message.

        Raises:
            ApiError: 400 if a prompt is too long.
        """
        account, body, model = asked.account, asked.body, asked.model
        adapter = await model.adapter(account.adapter)
        session = session_id(request.headers, body.user, body.prompt_cache_key, account.name)
        prompts = list[PromptBlocks]()
        for question in asked.questions:  # one at a time: each contains the whole state
            chat = await self._gateway.pool.run_if_large(
                partial(_asking, question, asked.state, make_chat),
                size=asked.num_bytes,
                owner=account.name,
            )
            prompts.append(
                await model.encoder.chat(
                    chat,
                    checked.feasibility,
                    owner=account.name,
                    num_bytes=asked.num_bytes,
                    cache_salt=checked.cache_salt,
                    tenant=account.tenant(body.user, self._gateway.config.tenants.cache_isolation),
                    session=session,
                    adapter=adapter,
                )
            )
        return prompts


def _asking(question: Question, state: str, make_chat: Callable[[str], ChatPrompt]) -> ChatPrompt:
    """The chat of one question: its user message contains the state and the question."""
    return make_chat(question.after(state))
