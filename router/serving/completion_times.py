"""CompletionSpec: what one completion requests. CompletionTimes: times for metrics and SLOs."""

from __future__ import annotations

import msgspec

from router.fleet import Feasibility, PromptBlocks
from router.metrics.stats import ModelStats
from worker.protocol.messages import FinishReason
from worker.protocol.sampling import SamplingParams
from worker.protocol.slo import Slo, SloOutcome, outcome, slo_class
from worker.protocol.times import FirstTokenTimes


class CompletionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one completion requests; enough to start the completion on any worker."""

    request_id: str
    index: int
    """Index of the choice in the response."""
    prompt: PromptBlocks
    sampling: SamplingParams
    """Sampling parameters with n = 1, shared by all completions of the client's request."""
    seed: int
    """Seed of this completion, which differs from those of the request's other completions."""
    feasibility: Feasibility
    """Check of the client's request against the workers' limits."""
    priority: int
    """Priority of the client's request: higher values are scheduled first."""
    gateway_id: str
    slo: Slo | None = None
    tenant: str = ""
    traceparent: str = ""
    """W3C trace context of the gateway's span; empty if the request is not traced."""


class CompletionTimes:
    """Times of one completion's events, which are also recorded in the model's stats.

    Args:
        spec: the request of the completion.
        stats: counters of the model.
        now: time of the request's arrival; all times are seconds on the event loop's clock.
    """

    __slots__ = (
        "_counted",
        "_first_token_at",
        "_from_worker",
        "_latency",
        "_spec",
        "_stats",
        "_submitted_at",
        "arrived_at",
        "last_token_at",
    )

    def __init__(self, spec: CompletionSpec, stats: ModelStats, now: float) -> None:
        self.arrived_at = now
        self._spec = spec
        self._stats = stats
        self._latency = stats.latency(spec.slo)
        self._counted = [stats.tenants.of(spec.tenant, now)]
        """Counters of the tenant, and of the LoRA adapter if there is one."""
        if spec.prompt.adapter is not None and stats.adapters is not None:
            self._counted.append(stats.adapters.of(spec.prompt.adapter.name, now))
        for counted in self._counted:
            counted.begin(spec.prompt.num_tokens, now)
        self._submitted_at = now
        self._first_token_at = 0.0
        self.last_token_at = 0.0
        """Time of the last token; 0 before the first."""
        self._from_worker: FirstTokenTimes | None = None
        """Parts of the time to first token reported by the worker; None if it reported none."""

    @property
    def first_token_s(self) -> float:
        """Seconds from arrival to the first token; -1 before it."""
        return self._first_token_at - self.arrived_at if self._first_token_at else -1.0

    @property
    def at_worker_s(self) -> float:
        """Seconds from the last submit to the first token; undefined before the first token."""
        return self._first_token_at - self._submitted_at

    def submitted(self, now: float) -> float:
        """Records that the request is sent to a worker; returns the seconds since its arrival."""
        self._submitted_at = now
        return now - self.arrived_at

    def took_tokens(self, number: int, now: float, from_worker: FirstTokenTimes | None) -> None:
        """Records new tokens, or the vector of a pooling model (0 tokens). `from_worker` has the
        parts of the time to first token, if the worker reports them with the first tokens."""
        self._stats.generation_tokens += number
        if self._first_token_at:
            self._latency.inter_token.observe((now - self.last_token_at) / number, number)
        else:
            self._first_token_at = now
            self._from_worker = from_worker
            route_s = self._submitted_at - self.arrived_at
            self._latency.began(now - self.arrived_at, route_s, from_worker)
        self.last_token_at = now

    def flushed(self, now: float) -> bool:
        """Records that text is written to the client; returns False if there is no token yet."""
        if not self._first_token_at:
            return False
        if self._from_worker is not None:
            at_worker = self._from_worker.queue_s + self._from_worker.prefill_s
            self._latency.first_flush.observe(max(now - self._submitted_at - at_worker, 0.0))
        return True

    def rejected(self) -> None:
        """Counts a rejection because the queues of all workers are full."""
        self._stats.rejected += 1
        for counted in self._counted:
            counted.rejected += 1

    def ended(
        self, reason: FinishReason, now: float, num_tokens: int, num_cached: int
    ) -> SloOutcome | None:
        """Records the end of the completion.

        Args:
            reason: finish reason.
            now: time of the end.
            num_tokens: number of tokens generated.
            num_cached: number of prompt tokens found in the prefix cache.

        Returns:
            Whether the SLO was met; None if there is none, or if the completion was aborted.
        """
        spec, stats = self._spec, self._stats
        stats.finished[reason] += 1
        stats.cached_tokens += num_cached
        slo: SloOutcome | None = None
        if spec.slo is not None and reason != "abort":
            slo = outcome(
                spec.slo,
                arrived_s=self.arrived_at,
                first_token_s=self._first_token_at,
                last_token_s=now,
                num_tokens=num_tokens,
            )
            key = (spec.priority, slo_class(spec.slo), slo.met)
            stats.slo[key] = stats.slo.get(key, 0) + 1
        if reason in ("stop", "length"):
            self._latency.request.observe(now - self.arrived_at)
            stats.completion_tokens.observe(num_tokens)
            if num_tokens > 1:
                per_token_s = (now - self._first_token_at) / (num_tokens - 1)
                self._latency.time_per_token.observe(per_token_s)
        for counted in self._counted:
            counted.end(
                first_token_s=self.first_token_s,
                generation_tokens=num_tokens,
                cached_tokens=num_cached,
                met=None if slo is None else slo.met,
            )
        return slo
