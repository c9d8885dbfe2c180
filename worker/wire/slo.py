"""Service-level objectives of one request, and whether they were met."""

from __future__ import annotations

from typing import Literal

import msgspec

SloClass = Literal["interactive", "server", "relaxed", "none"]
"""How demanding an SLO is, for metrics: limits of MLPerf's scenarios of these names for an 8B
model, whatever else was asked for, and nothing asked for."""
INTERACTIVE_MS = (500.0, 30.0)
"""Largest time to the first token, and largest per further token."""
SERVER_MS = (2000.0, 100.0)


class Slo(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Times that a client hopes for, in milliseconds; None where it does not say."""

    ttft_ms: float | None = None
    """Arrival to first token."""
    tpot_ms: float | None = None
    """Mean time per token after the first."""
    e2e_ms: float | None = None
    """Arrival to last token."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            # Not "value <= 0": a NaN is refused too.
            if value is not None and not 0.0 < value < 1e12:
                raise ValueError(f"slo.{name} must be above 0, got {value}")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None


class SloOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it: times as measured, None where there were no tokens to measure."""

    met: bool
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


def slo_class(slo: Slo | None) -> SloClass:
    """The most demanding class that one of its limits belongs to."""
    if slo is None or slo.is_empty:
        return "none"
    asked = (slo.ttft_ms, slo.tpot_ms)
    if _any_within(asked, INTERACTIVE_MS):
        return "interactive"
    return "server" if _any_within(asked, SERVER_MS) else "relaxed"


def outcome(
    slo: Slo, *, arrived_s: float, first_token_s: float, last_token_s: float, num_tokens: int
) -> SloOutcome:
    """Holds the times of a completion that has ended, on one clock, against what was asked for.

    One without any token has met nothing that was asked for.
    """
    if not num_tokens:
        return SloOutcome(met=slo.is_empty, ttft_ms=None, tpot_ms=None, e2e_ms=None)
    first = (first_token_s - arrived_s) * 1e3
    last = (last_token_s - arrived_s) * 1e3
    per_token = (last - first) / (num_tokens - 1) if num_tokens > 1 else None
    met = all(
        wanted is None or found is None or found <= wanted
        for wanted, found in ((slo.ttft_ms, first), (slo.tpot_ms, per_token), (slo.e2e_ms, last))
    )
    return SloOutcome(met=met, ttft_ms=first, tpot_ms=per_token, e2e_ms=last)


def _any_within(asked: tuple[float | None, ...], limits: tuple[float, ...]) -> bool:
    return any(
        value is not None and value <= limit for value, limit in zip(asked, limits, strict=True)
    )
