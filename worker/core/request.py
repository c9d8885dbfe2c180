"""A request inside a worker: its tokens, its progress, and its state."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import Enum, auto
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import Final

from worker.core.adapters import Adapter
from worker.core.cache.lease import Lease
from worker.core.draft_acceptance import RequestRecord
from worker.core.grammar.state import GrammarProblem, GrammarStatus
from worker.core.request_records import (
    BlockProgress,
    Delivery,
    PreemptionRecord,
    QueueEntry,
    RequestTimes,
)
from worker.protocol.messages import FinishReason, Rejection, Submit
from worker.protocol.slo import Slo


class RequestState(Enum):
    """State of a request; `Request.move_to` allows only the transitions below.

    WAITING ──> RUNNING ──> FINISHED_STOPPED | FINISHED_LENGTH | FINISHED_ABORTED | FINISHED_ERROR
                 │   ^
                 v   │
               PREEMPTED        (WAITING and PREEMPTED can also finish: aborted, rejected for lack
                                 of room, or by their grammar)
    """

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


_FINISH_REASONS: Final[Mapping[RequestState, FinishReason]] = MappingProxyType(
    {
        RequestState.FINISHED_STOPPED: "stop",
        RequestState.FINISHED_LENGTH: "length",
        RequestState.FINISHED_ABORTED: "abort",
        RequestState.FINISHED_ERROR: "error",
    }
)

_MOVES: Final[Mapping[RequestState, tuple[RequestState, ...]]] = MappingProxyType(
    {
        RequestState.WAITING: (RequestState.RUNNING, *_FINISH_REASONS),
        RequestState.RUNNING: (RequestState.PREEMPTED, *_FINISH_REASONS),
        RequestState.PREEMPTED: (
            RequestState.RUNNING,
            RequestState.FINISHED_STOPPED,
            RequestState.FINISHED_ABORTED,
            RequestState.FINISHED_ERROR,
        ),
    }
)
"""Allowed transitions by state; a finished state has none."""


class IllegalMove(RuntimeError):
    """A transition to a state that cannot follow the request's current one."""


class Request:
    """A submitted request: parameters, tokens, and progress.

    Fields that belong to one component of the scheduler are grouped in
    `worker.core.request_records`.

    Positions of its token row while steps are in flight:

        0 ──────────── num_computed ─────────── known ───────── known + placeholders
        │ in KV cache  │ to compute              │ sampled on the device, not known here

    Args:
        submit: the original message.
        arrival: sequence number among the requests of the scheduler; lower is older.
        arrived_s: time of arrival at the gateway, in seconds on the scheduler's clock.
        max_total_tokens: maximum number of tokens of prompt plus completion on this worker.
        eos_token_ids: the model's EOS tokens.
        block_size: tokens per block in block diffusion; 1 for an autoregressive model.
        has_canvases: whether blocks are canvases, which follow the known tokens at any position.
    """

    __slots__ = (
        "adapter",
        "adapter_ref",
        "arrival",
        "attempt",
        "block_size",
        "blocks",
        "cache_salt",
        "delivery",
        "end_token_ids",
        "error",
        "gateway_id",
        "grammar",
        "has_canvases",
        "is_pooled",
        "is_resubmitted",
        "lease",
        "level",
        "limit",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_expected_cached",
        "num_placeholders",
        "num_prefill",
        "num_prompt",
        "num_unverified",
        "preemption",
        "priority",
        "queue_entry",
        "rejection",
        "request_id",
        "sampling",
        "second_text",
        "seed",
        "speculation",
        "state",
        "tenant",
        "times",
        "token_ids",
        "tpot_s",
    )

    def __init__(
        self,
        submit: Submit,
        *,
        arrival: int,
        arrived_s: float,
        max_total_tokens: int,
        eos_token_ids: tuple[int, ...],
        block_size: int = 1,
        has_canvases: bool = False,
    ) -> None:
        self.request_id, self.attempt = submit.request_id, submit.attempt
        self.gateway_id = submit.gateway_id
        self.cache_salt = submit.cache_salt
        self.adapter_ref = submit.adapter
        """The request's LoRA adapter; None for the base model."""
        self.num_expected_cached = submit.num_expected_cached
        self.priority = submit.priority
        self.tenant = submit.tenant
        self.sampling = submit.sampling
        self.is_pooled = submit.sampling.pooling is not None
        """Whether the request returns a vector and ends when its last token is computed."""
        self.second_text = submit.second_text
        """Index of the first token of a pair's second text; 0 if there is none."""
        self.seed = submit.sampling.seed if submit.seed is None else submit.seed
        self.is_resubmitted = submit.is_resubmitted or submit.num_resumed > 0
        """Whether a previous worker failed after accepting the request."""
        self.arrival = arrival
        self.token_ids = array("i")
        self.token_ids.frombytes(submit.prompt)
        assert 0 <= submit.num_resumed < len(self.token_ids), "resumed tokens follow a prompt"
        self.num_prompt = len(self.token_ids) - submit.num_resumed
        """Number of prompt tokens; tokens generated by an earlier attempt count as output."""
        self.limit = max_total_tokens
        """Number of tokens, prompt included, at which the request ends with finish reason "length".
        """
        if self.sampling.pooling is not None:
            self.limit = self.num_prompt + 1  # it generates nothing and never reaches the limit
        elif self.sampling.max_tokens is not None:
            self.limit = min(self.limit, self.num_prompt + self.sampling.max_tokens)
        eos = () if self.sampling.ignore_eos else eos_token_ids
        self.end_token_ids = _end_tokens(tuple(eos), self.sampling.stop_token_ids)
        """EOS and stop tokens that end the request."""
        self.block_size = block_size
        self.has_canvases = has_canvases
        self._begin(arrived_s, arrived_s + submit.waited_ms / 1e3, submit.slo)

    def _begin(self, arrived_s: float, queued_s: float, slo: Slo | None) -> None:
        """Initializes the state that changes from step to step, and the records of the scheduler's
        components."""
        self.state = RequestState.WAITING
        self.level = self.priority
        """Urgency, 0 to 9: the priority, raised near a deadline. A running request keeps the level
        that it had at admission."""
        self.lease: Lease | None = None
        """Slot and cache pages; None unless RUNNING."""
        self.adapter: Adapter | None = None
        """The request's LoRA adapter while the request waits for it or uses it (`AdapterGate`);
        otherwise None."""
        self.num_prefill = len(self.token_ids)
        """Number of known tokens at the last admission (or when queued); prefill ends when they are
        computed."""
        self.num_computed = 0
        """Number of positions computed by all launched steps, excluding rejected drafts."""
        self.num_placeholders = 0
        """Number of tokens that launched steps are sampling and that are not known here yet,
        excluding drafts."""
        self.num_unverified = 0
        """Number of drafts in flight: up to this many may be added to `num_placeholders` and
        `num_computed`."""
        self.num_cached = -1
        """Number of cached prompt tokens at the first admission; -1 before that."""
        self.num_charged = self.num_output
        """Number of generated tokens for which the request's tenant has been charged, by this
        worker or an earlier one."""
        self.error: str | None = None
        """Message of the error that ends the request; None if there is none."""
        self.rejection: Rejection | None = None
        """Response to the client if the request ends with an error that is not the worker's
        fault."""
        self.grammar: GrammarStatus | None = None
        """Last reported status of the request's grammar, set before the first admission; None if it
        has no grammar."""
        self.speculation: RequestRecord | None = None
        """Acceptance of the request's drafts; None until the speculation gate first considers
        it.
        """
        self.times = RequestTimes(arrived_s, queued_s, slo, num_resumed=self.num_output)
        self.tpot_s = inf
        """Target of the request's SLO, in seconds per output token; infinite if it has none."""
        if slo is not None and slo.tpot_ms is not None:
            self.tpot_s = slo.tpot_ms / 1e3
        self.queue_entry = QueueEntry()
        self.preemption = PreemptionRecord()
        self.delivery = Delivery(num_sent=len(self.token_ids))
        self.blocks = BlockProgress()

    def move_to(self, state: RequestState) -> None:
        """Enters `state`. Raises IllegalMove if the transition is not allowed."""
        if state not in _MOVES.get(self.state, ()):
            raise IllegalMove(
                f"request {self.request_id} cannot move from {self.state.name} to {state.name}"
            )
        self.state = state

    @property
    def num_pending(self) -> int:
        """Number of positions that the next steps can compute, including those of tokens being
        sampled.

        1 for a decode (or a prompt's last token), more for a prefill or a block; 0 if the tokens
        being sampled reach the length limit.
        """
        num_tokens = len(self.token_ids) + self.num_placeholders
        if num_tokens >= self.limit:
            return 0
        if self.block_size > 1:
            return self.num_to_compute - self.num_computed
        return num_tokens - self.num_computed

    @property
    def num_to_compute(self) -> int:
        """Number of positions to compute before the next token or the next block.

        A block-diffusion model computes the whole block that contains the next token, or the
        canvas that begins with it.
        """
        num_tokens = len(self.token_ids) + self.num_placeholders
        if self.block_size == 1:
            return num_tokens
        if self.has_canvases:
            return num_tokens + self.block_size
        return (num_tokens // self.block_size + 1) * self.block_size

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason as named by the API; None while the request has not ended."""
        return _FINISH_REASONS.get(self.state)

    @property
    def ended_by_grammar(self) -> bool:
        """Whether the request ended because its grammar was complete rather than by an
        EOS token."""
        return (
            self.state is RequestState.FINISHED_STOPPED
            and self.grammar is not None
            and self.grammar.is_complete
            and not (self.num_output and self.token_ids[-1] in self.end_token_ids)
        )

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the whole prompt must be computed, even if it is cached, for prompt
        log-probabilities.

        These are complete when the first token is sampled, so a request with tokens from an earlier
        attempt does not need them again.
        """
        return self.sampling.prompt_logprobs is not None and not self.num_output

    @property
    def due_s(self) -> float:
        """Deadline of the next token on the scheduler's clock, in seconds; infinite if there is no
        SLO."""
        return self.times.due_s(self.num_output)

    @property
    def num_output(self) -> int:
        """Number of known generated tokens."""
        return len(self.token_ids) - self.num_prompt

    def give_up(self, problem: GrammarProblem) -> None:
        """Sets the grammar's problem as the error that ends the request."""
        self.error = problem.message
        if problem.status < 500:
            self.rejection = Rejection(
                request_id=self.request_id,
                attempt=self.attempt,
                message=problem.message,
                status=problem.status,
                param="structured_outputs",
            )

    def give_up_adapter(self, problem: str) -> None:
        """Sets the error that occurred when reading the LoRA adapter as the error that ends the
        request."""
        assert self.adapter_ref is not None
        self.error = f"LoRA adapter {self.adapter_ref.name} could not be loaded: {problem}"
        self.rejection = Rejection(
            request_id=self.request_id, attempt=self.attempt, message=self.error, status=500
        )

    def check_invariants(self, page_size: int) -> None:
        """Asserts that the request's counts are consistent with its state and lease."""
        assert (self.lease is not None) == (self.state is RequestState.RUNNING)
        assert self.num_prompt > 0
        assert self.num_computed >= 0
        assert len(self.token_ids) < self.limit, "the request should have ended"
        assert self.num_computed <= self.num_to_compute
        if self.lease is None:
            assert self.num_computed == 0
            assert self.num_placeholders == 0
            assert self.num_unverified == 0
        else:
            assert self.num_computed <= len(self.lease.pages) * page_size, (
                "computed positions exceed the pages"
            )
            assert self.lease.num_cached_pages * page_size <= self.num_computed


@lru_cache(maxsize=8)
def _end_tokens(eos: tuple[int, ...], stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Set of EOS and stop tokens, shared by all completions of a request, since a set of 1,024
    tokens takes 64 KiB."""
    return frozenset((*eos, *stop_token_ids))
