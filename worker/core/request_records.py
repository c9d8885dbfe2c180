"""What parts of the scheduler note beside a request: each record is written by one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from worker.wire.messages import TokenLogprobs
from worker.wire.slo import Slo
from worker.wire.times import FirstTokenTimes


@dataclass(slots=True)
class QueueEntry:
    """How a request stands in the queue (`WaitingQueue`, `Admission`)."""

    deadline_s: float = inf
    """When its next token is due, by the scheduler's clock, if that can still be done."""
    generation: int = 0
    """Changes whenever it enters or leaves the queue: entries of an older one are dead."""
    num_uncached: int = 0
    """Tokens to compute if it is admitted, as of `uncached_round`."""
    uncached_round: int = -1
    """Admission round in which they were counted last; -1 for never."""


@dataclass(slots=True)
class PreemptionRecord:
    """How often a request was preempted, and what that cost it (`Lifecycle`)."""

    count: int = 0
    num_computed: int = 0
    """Positions that were computed when that happened last."""
    resumed_at: int = 0
    """Known tokens when it was last admitted again; 0 if it never was preempted."""


@dataclass(slots=True)
class Delivery:
    """What a request's gateway has been sent, and what is still to be sent (`OutputBuffer`)."""

    num_sent: int
    """Known tokens when the last delta was made."""
    cached_sent: bool = False
    """Whether a delta has said how many of its tokens were cached."""
    times_sent: bool = False
    """Whether a delta has said how its first token's time was spent."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens that no delta has carried yet, where it asks for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt tokens computed so far, until a delta has carried them; None before it
    runs and where it does not ask."""


@dataclass(slots=True)
class BlockProgress:
    """How a block-diffusion model gets on with a request (`BlockSteps`)."""

    state: bytes = b""
    """The running block as the last step left it, opaque; empty where none has begun."""
    num_rounds: int = 0
    """Passes in which something of it was to be decided."""
    num_forwards: int = 0
    """All passes that computed something for it."""


@dataclass(slots=True)
class RequestTimes:
    """When what happened to a request, by the scheduler's clock, and when more is due."""

    arrived_s: float
    """At its gateway."""
    queued_s: float
    """At this worker."""
    slo: Slo | None
    """What its client hopes for."""
    admitted_s: float = -1.0
    """Into the running set, first; -1 before."""
    first_token_s: float = -1.0
    """When the first token came; -1 before."""

    @property
    def first_token(self) -> FirstTokenTimes | None:
        """How its first token's time was spent here; None before."""
        if self.first_token_s < 0.0:
            return None
        queue_s = max(self.admitted_s - self.queued_s, 0.0)
        return FirstTokenTimes(queue_s, max(self.first_token_s - self.admitted_s, 0.0))

    def due_s(self, num_output: int) -> float:
        """When its next token is due; infinite without an SLO.

        The first by `ttft_ms`; a later one by `tpot_ms`, as if tokens came evenly; any by `e2e_ms`.

        Args:
            num_output: tokens that it has.
        """
        slo = self.slo
        if slo is None:
            return inf
        due = inf
        if slo.e2e_ms is not None:
            due = self.arrived_s + slo.e2e_ms / 1e3
        if not num_output:
            if slo.ttft_ms is not None:
                due = min(due, self.arrived_s + slo.ttft_ms / 1e3)
        elif slo.tpot_ms is not None and self.first_token_s >= 0.0:
            due = min(due, self.first_token_s + num_output * slo.tpot_ms / 1e3)
        return due
