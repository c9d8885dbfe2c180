"""Generation: all completions of one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.fleet import Feasibility, PromptBlocks
from router.serving.completion import Completion, Mailbox
from router.tracing import RequestSpan, Value
from router.work_slice import WorkSlice
from worker.protocol.messages import DEFAULT_PRIORITY, TokenLogprobs
from worker.protocol.slo import Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A client's request for completions of one model."""

    request_id: str
    """Request id for the client; prefix of the ids of its completions."""
    prompts: Sequence[PromptBlocks]
    """Prompts, each of which gets n completions."""
    feasibility: Feasibility
    """Sampling parameters, and the check of the request against the workers' limits."""
    stream: bool
    """Whether `take` returns completions with new tokens, or only those that have ended."""
    priority: int = DEFAULT_PRIORITY
    """Priority at the workers: higher values are scheduled first."""
    slo: Slo | None = None
    shown_tokens: frozenset[str] = frozenset()
    """Special tokens that are kept in the text even if skip_special_tokens is set."""
    with_offsets: bool = False
    """Whether completions compute the text offsets of their tokens."""
    tenant: str = ""
    """Tenant for fairness and metrics; empty if there is none."""
    arrived_at: float | None = None
    """Time of arrival on the event loop's clock; None to use the time at which
    `ServedModel.generation` is called."""
    span: RequestSpan | None = None
    """Trace span of the request; None if it is not traced."""


class Generation:
    """The completions of one request, in the order of its prompts.

    Call `start`, then `take` until `finished`; always call `close`, which aborts unfinished
    completions.
    """

    def __init__(
        self,
        request: GenerationRequest,
        completions: Sequence[Completion],
        mailbox: Mailbox,
        place: Callable[[Completion], Awaitable[None]],
        *,
        explain: bool = False,
    ) -> None:
        self.request = request
        self.completions = completions
        self.explain = explain
        """Whether responses have headers that explain the routing decision."""
        self.client_left = False
        """Whether the client has disconnected."""
        self.take: Callable[[], Awaitable[list[Completion]]] = mailbox.take
        """Waits for completions with new output, and returns them."""
        self._mailbox = mailbox
        self._place = place

    @property
    def finished(self) -> bool:
        """Whether all completions have ended, and `take` has returned all of them."""
        return not self._mailbox and all(completion.finished for completion in self.completions)

    @property
    def problem(self) -> str | None:
        """Error of the first failed completion; None if none has failed."""
        return next((c.error for c in self.completions if c.error), None)

    @property
    def workers(self) -> str:
        """Ids of the workers that serve the completions, joined by commas."""
        return ",".join(dict.fromkeys(c.worker_id for c in self.completions if c.worker_id))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts, each counted once."""
        return sum(prompt.num_tokens for prompt in self.request.prompts)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_rounds(self) -> int:
        """Number of forward passes so far that decided tokens (block diffusion)."""
        return sum(completion.num_rounds for completion in self.completions)

    @property
    def num_forwards(self) -> int:
        """Number of forward passes so far (block diffusion); 0 for an autoregressive model."""
        return sum(completion.num_forwards for completion in self.completions)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in prefix caches: per prompt, the maximum over its completions."""
        best: dict[int, int] = {}
        for completion in self.completions:
            prompt = id(completion.spec.prompt)
            best[prompt] = max(best.get(prompt, 0), completion.num_cached_tokens)
        return sum(best.values())

    def prompt_logprobs(self, completion: Completion) -> list[TokenLogprobs] | None:
        """Log-probabilities of a completion's prompt, which only the prompt's first completion may
        have."""
        n = self.request.feasibility.sampling.n
        first = self.completions[completion.spec.index // n * n]
        return completion.prompt_logprobs or first.prompt_logprobs

    async def start(self) -> None:
        """Submits all completions to workers. If one cannot be placed, ends all of them and raises
        ApiError."""
        try:
            if len(self.completions) == 1:
                await self._place(self.completions[0])
            else:
                work = WorkSlice()
                async with asyncio.TaskGroup() as group:
                    for completion in self.completions:
                        group.create_task(_run(self._place(completion)))
                        if work.is_over:
                            await work.next()
        except BaseExceptionGroup as errors:
            self._give_up()
            raise errors.exceptions[0] from None
        except BaseException:
            self._give_up()
            raise

    def flushed(self, now: float) -> None:
        """Records that the first text is written to the client."""
        for completion in self.completions:
            if completion.times.flushed(now):
                return

    def end_span(self, problem: str | None) -> None:
        """Ends the trace span of the request, with an error if there is a `problem`."""
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
        """Aborts completions that have not ended. Idempotent."""
        for completion in self.completions:
            completion.abort()

    def _give_up(self) -> None:
        self.close()
        self._mailbox.clear()  # no one reads it, and its items and their sender form a cycle


async def _run(work: Awaitable[None]) -> None:
    await work
