"""All completions of one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.fleet import Feasibility, PromptBlocks
from router.serving.completion import Completion
from router.serving.mailbox import Mailbox
from router.tracing import RequestSpan, Value
from worker.wire.messages import DEFAULT_PRIORITY, TokenLogprobs
from worker.wire.slo import Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A client's request to one model."""

    request_id: str
    """Id as the client sees it; requests of the fleet are named after it."""
    prompts: Sequence[PromptBlocks]
    feasibility: Feasibility
    """Knows the sampling parameters: n completions for each prompt."""
    stream: bool
    """Whether `take` returns with each token, or at the end only."""
    priority: int = DEFAULT_PRIORITY
    slo: Slo | None = None
    shown_tokens: frozenset[str] = frozenset()
    """Special tokens that stand in the text even where others are left out of it."""
    tenant: str = ""
    """Tenant whom its service is charged to."""
    arrived_at: float | None = None
    """Time of arrival on the event loop's clock; None for now."""
    span: RequestSpan | None = None
    """Span in which the request is traced."""


class Generation:
    """The completions of one request, prompt by prompt, and their news.

    `start`, then `take` until `finished`; `close` in any case: it aborts what still runs.
    """

    def __init__(
        self,
        request: GenerationRequest,
        completions: Sequence[Completion],
        mailbox: Mailbox[Completion],
        place: Callable[[Completion], Awaitable[None]],
        *,
        explain: bool = False,
    ) -> None:
        self.request = request
        self.completions = completions
        self.explain = explain
        """Whether the decisions are reported to the client."""
        self.client_left = False
        """Whether nobody reads what is written."""
        self._mailbox = mailbox
        self._place = place

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: all have ended, and `take` has returned it."""
        return not self._mailbox and all(completion.finished for completion in self.completions)

    @property
    def problem(self) -> str | None:
        """The problem of the first of them that an error ended; None where none has."""
        return next((c.error for c in self.completions if c.error), None)

    @property
    def workers(self) -> str:
        """The workers that serve it, joined by commas."""
        return ",".join(dict.fromkeys(c.worker_id for c in self.completions if c.worker_id))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(prompt.num_tokens for prompt in self.request.prompts)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_rounds(self) -> int:
        """Passes of a block-diffusion model so far that found something to decide."""
        return sum(completion.num_rounds for completion in self.completions)

    @property
    def num_forwards(self) -> int:
        """Forward passes of a block-diffusion model so far; 0 for an autoregressive one."""
        return sum(completion.num_forwards for completion in self.completions)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in prefix caches; of several completions of a prompt, the best."""
        best: dict[int, int] = {}
        for completion in self.completions:
            prompt = id(completion.spec.prompt)
            best[prompt] = max(best.get(prompt, 0), completion.num_cached_tokens)
        return sum(best.values())

    def prompt_logprobs(self, completion: Completion) -> list[TokenLogprobs] | None:
        """Log-probabilities of a prompt; the first of its completions may have them alone."""
        n = self.request.feasibility.sampling.n
        first = self.completions[completion.spec.index // n * n]
        return completion.prompt_logprobs or first.prompt_logprobs

    async def start(self) -> None:
        """Hands every completion to a worker. Raises ApiError; everything is then ended."""
        try:
            if len(self.completions) == 1:
                await self._place(self.completions[0])
            else:
                async with asyncio.TaskGroup() as group:
                    for completion in self.completions:
                        group.create_task(_run(self._place(completion)))
        except BaseExceptionGroup as errors:
            self._give_up()
            raise errors.exceptions[0] from None
        except BaseException:
            self._give_up()
            raise

    def flushed(self, now: float) -> None:
        """The first text has been written to the client."""
        for completion in self.completions:
            if completion.times.flushed(now):
                return

    def take(self) -> Awaitable[list[Completion]]:
        """Completions with news, waiting for some."""
        return self._mailbox.take()

    def end_span(self, problem: str | None) -> None:
        """The response has ended, by an error where there is a `problem`: so does its trace."""
        span, completions = self.request.span, self.completions
        if span is None:
            return
        attributes: dict[str, Value] = {
            "gen_ai.usage.input_tokens": self.num_prompt_tokens,
            "gen_ai.usage.output_tokens": self.num_completion_tokens,
            "gen_ai.response.finish_reasons": [c.finish_reason or "abort" for c in completions],
            "rayfleet.worker_id": self.workers,
            "rayfleet.cached_tokens": self.num_cached_tokens,
            "rayfleet.attempts": 1 + max(c.attempt for c in completions),
        }
        if completions[0].times.first_token_s >= 0.0:
            attributes["rayfleet.time_to_first_token_s"] = completions[0].times.first_token_s
        span.end(attributes, problem)

    def close(self) -> None:
        """Aborts what has not finished. Safe to call twice."""
        for completion in self.completions:
            completion.abort()

    def _give_up(self) -> None:
        self.close()
        self._mailbox.clear()  # nobody takes the news, and these and their sender are a cycle


async def _run(work: Awaitable[None]) -> None:
    await work
