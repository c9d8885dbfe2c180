"""Service level objectives: latency limits by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Latency limits for 99 % of the requests."""

    ttft_ms: float
    """Time to first token in ms."""
    tpot_ms: float
    """Time per output token in ms."""


MLPERF: dict[str, Slo] = {
    "llama2-70b": Slo(ttft_ms=2000, tpot_ms=200),
    "llama2-70b-interactive": Slo(ttft_ms=450, tpot_ms=40),
    "llama3.1-8b": Slo(ttft_ms=2000, tpot_ms=100),
    "llama3.1-8b-interactive": Slo(ttft_ms=500, tpot_ms=30),
    "llama3.1-405b": Slo(ttft_ms=6000, tpot_ms=175),
    "llama3.1-405b-interactive": Slo(ttft_ms=4500, tpot_ms=80),
    "mixtral": Slo(ttft_ms=2000, tpot_ms=200),
    "deepseek-r1": Slo(ttft_ms=2000, tpot_ms=80),
    "deepseek-r1-interactive": Slo(ttft_ms=1500, tpot_ms=15),
    "gpt-oss-120b": Slo(ttft_ms=3000, tpot_ms=80),
}
"""Limits of MLPerf Inference's server and interactive scenarios, by model."""


def find_slo(text: str) -> Slo:
    """Limits for one of MLPerf's model names, or from text of the form TTFT_MS:TPOT_MS. Raises
    ValueError for any other text."""
    if text in MLPERF:
        return MLPERF[text]
    ttft, _, tpot = text.partition(":")
    try:
        return Slo(ttft_ms=float(ttft), tpot_ms=float(tpot))
    except ValueError:
        raise ValueError(
            f"--slo must be TTFT_MS:TPOT_MS or one of {', '.join(MLPERF)}, got {text!r}"
        ) from None
