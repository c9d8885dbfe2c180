"""Records that parts of the scheduler keep with a request; each is written by one part only."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from worker.protocol.messages import TokenLogprobs
from worker.protocol.slo import Slo
from worker.protocol.times import FirstTokenTimes


@dataclass(slots=True)
class QueueEntry:
    """Place of a request in the queue (`WaitingQueue`, `Admission`)."""

    deadline_s: float = inf
    """When the next token is due, by the scheduler's clock in seconds; infinite without an SLO, or
    where that can no longer be met."""
    generation: int = 0
    """Number that is raised whenever the request enters or leaves the queue; what refers to an
    older one is void."""
    num_uncached: int = 0
    """Tokens that the prefix cache lacked when it was last looked up."""
    uncached_round: int = -1
    """Admission round of that look-up; -1 for none."""
    awaited: int = -1
    """Arrival of the prompt under way that computes a shared prefix for it; -1 for none."""
    awaited_until: int = -1
    """Cached tokens of that prompt up to which the request waits for it."""


@dataclass(slots=True)
class PreemptionRecord:
    """Record of the times that a request left the running set unfinished (`Lifecycle`)."""

    count: int = 0
    """Times that it was preempted, or held for its grammar."""
    num_computed: int = 0
    """Positions that were computed the last time."""
    resumed_at: int = 0
    """Known tokens when it was last admitted again; 0 for never."""


@dataclass(slots=True)
class Delivery:
    """Record of what a request's gateway was sent, and is still to be sent (`OutputBuffer`)."""

    num_sent: int
    """Known tokens when the last delta was made."""
    cached_sent: bool = False
    """Whether a delta has carried `num_cached_tokens`."""
    times_sent: bool = False
    """Whether a delta has carried the times of the first token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of generated tokens that no delta has carried yet."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of prompt tokens that no delta has carried yet; None before the request
    runs, after its first token, and unless it asks for them."""
    num_prompt_scored: int = 0
    """Prompt tokens whose log-probabilities are known, whether sent or not."""


@dataclass(slots=True)
class BlockProgress:
    """Progress of a block-diffusion model with a request (`BlockSteps`)."""

    state: bytes = b""
    """State of the running block after the last step, opaque; empty where none has begun."""
    num_rounds: int = 0
    """Passes that decided positions of the request's blocks."""
    num_forwards: int = 0
    """All forward passes that computed anything for the request."""


@dataclass(slots=True)
class RequestTimes:
    """Moments of a request, in seconds of the scheduler's clock, and its deadlines."""

    arrived_s: float
    """Arrival at the gateway."""
    queued_s: float
    """Arrival at this worker."""
    slo: Slo | None
    """Service-level objective; None without one."""
    admitted_s: float = -1.0
    """First admission to the running set; -1 before."""
    first_token_s: float = -1.0
    """First token; -1 before."""

    @property
    def first_token(self) -> FirstTokenTimes | None:
        """Times in queue and prefill before the first token; None before it."""
        if self.first_token_s < 0.0:
            return None
        queue_s = max(self.admitted_s - self.queued_s, 0.0)
        return FirstTokenTimes(queue_s, max(self.first_token_s - self.admitted_s, 0.0))

    def due_s(self, num_output: int) -> float:
        """When the next token is due; infinite without an SLO.

        The first token is due by `ttft_ms`, later ones at even distances by `tpot_ms`, all by
        `e2e_ms`.

        Args:
            num_output: tokens generated so far.
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
