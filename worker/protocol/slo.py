"""Service-level objectives (SLOs) of requests, and whether they were met."""

from __future__ import annotations

from typing import Literal

import msgspec

SloClass = Literal["interactive", "server", "relaxed", "none"]
"""Class of an SLO in metrics. interactive and server are within the limits of MLPerf Inference's
scenarios of the same names for an 8B model; relaxed is any other SLO, and none means no SLO."""
INTERACTIVE_MS = (500.0, 30.0)
"""Maximum (TTFT, TPOT) of class interactive, in milliseconds."""
SERVER_MS = (2000.0, 100.0)
"""Maximum (TTFT, TPOT) of class server, in milliseconds."""


class Slo(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Service-level objective of a request. Times are in milliseconds; None if there is no
    objective.

    Raises:
        ValueError: a time is not in (0, 1e12).
    """

    ttft_ms: float | None = None
    """Time to first token, from arrival at the gateway."""
    tpot_ms: float | None = None
    """Time per output token: mean over the tokens after the first."""
    e2e_ms: float | None = None
    """End-to-end latency: time from arrival to the last token."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            # Not "value <= 0", so that NaN is also rejected.
            if value is not None and not 0.0 < value < 1e12:
                raise ValueError(
                    f"slo.{name} must be greater than 0 and less than 1e12, got {value}"
                )

    @property
    def is_empty(self) -> bool:
        """Whether no objective is set."""
        return self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None


class SloOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an SLO was met, and the measured times. A time is None if there are no tokens to
    measure."""

    met: bool
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


def slo_class(slo: Slo | None) -> SloClass:
    """Strictest class to which any of the SLO's times belongs."""
    if slo is None or slo.is_empty:
        return "none"
    targets = (slo.ttft_ms, slo.tpot_ms)
    if _any_within(targets, INTERACTIVE_MS):
        return "interactive"
    return "server" if _any_within(targets, SERVER_MS) else "relaxed"


def outcome(
    slo: Slo, *, arrived_s: float, first_token_s: float, last_token_s: float, num_tokens: int
) -> SloOutcome:
    """Compares the times of a finished completion, all on one clock, with its SLO.

    A completion without tokens does not meet any objective.
    """
    if not num_tokens:
        return SloOutcome(met=slo.is_empty, ttft_ms=None, tpot_ms=None, e2e_ms=None)
    first = (first_token_s - arrived_s) * 1e3
    last = (last_token_s - arrived_s) * 1e3
    per_token = (last - first) / (num_tokens - 1) if num_tokens > 1 else None
    met = all(
        target is None or measured is None or measured <= target
        for target, measured in ((slo.ttft_ms, first), (slo.tpot_ms, per_token), (slo.e2e_ms, last))
    )
    return SloOutcome(met=met, ttft_ms=first, tpot_ms=per_token, e2e_ms=last)


def _any_within(targets: tuple[float | None, ...], limits: tuple[float, ...]) -> bool:
    return any(
        value is not None and value <= limit for value, limit in zip(targets, limits, strict=True)
    )
