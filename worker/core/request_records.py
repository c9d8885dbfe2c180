"""Records that parts of the scheduler keep per request; each is written by a single part."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from worker.protocol.messages import TokenLogprobs
from worker.protocol.slo import Slo
from worker.protocol.times import FirstTokenTimes


@dataclass(slots=True)
class QueueEntry:
    """Queue state of a request (`WaitingQueue`, `Admission`)."""

    deadline_s: float = inf
    """Deadline of the next token by the scheduler's clock in seconds; infinite without an SLO or if
    it can no longer be met."""
    generation: int = 0
    """Number that is incremented whenever the request enters or leaves the queue; references to an
    older one are stale."""
    num_uncached: int = 0
    """Uncached tokens at the last lookup in the prefix cache."""
    uncached_round: int = -1
    """Admission round of that lookup; -1 for none."""
    awaited: int = -1
    """Arrival number of the running prefill that computes a shared prefix for it; -1 for none."""
    awaited_until: int = -1
    """Cached tokens of that prefill up to which the request waits for it."""


@dataclass(slots=True)
class PreemptionRecord:
    """Record of the times that a request left the running set unfinished (`Lifecycle`)."""

    count: int = 0
    """Number of times that it was preempted, or held for its grammar."""
    num_computed: int = 0
    """Number of computed positions at the last time."""
    resumed_at: int = 0
    """Number of known tokens at the last readmission; 0 for none."""


@dataclass(slots=True)
class Delivery:
    """Record of what was sent to a request's gateway (`OutputBuffer`)."""

    num_sent: int
    """Known tokens at the last delta."""
    cached_sent: bool = False
    """Whether a delta has included `num_cached_tokens`."""
    times_sent: bool = False
    """Whether a delta has included the latencies of the first token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of generated tokens that are not sent yet."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of prompt tokens that are not sent yet; None unless requested, before the
    request runs, and after its first token."""
    num_prompt_scored: int = 0
    """Number of prompt tokens with known log-probabilities, sent or not."""


@dataclass(slots=True)
class BlockProgress:
    """Progress of a request of a block-diffusion model (`BlockSteps`)."""

    state: bytes = b""
    """Opaque state of the running block after the last step; empty if none has begun."""
    num_rounds: int = 0
    """Forward passes that decoded positions of the request's blocks."""
    num_forwards: int = 0
    """All forward passes with rows of the request."""


@dataclass(slots=True)
class RequestTimes:
    """Times of a request in seconds of the scheduler's clock, and its deadlines."""

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
        """Queueing and prefill time of the first token; None before it."""
        if self.first_token_s < 0.0:
            return None
        queue_s = max(self.admitted_s - self.queued_s, 0.0)
        return FirstTokenTimes(queue_s, max(self.first_token_s - self.admitted_s, 0.0))

    def due_s(self, num_output: int) -> float:
        """Deadline of the next token; infinite without an SLO.

        The first token is due after `ttft_ms`, later ones at intervals of `tpot_ms`, all of them by
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
