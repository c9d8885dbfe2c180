"""Metrics of runs, and ratios between runs of the same round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.bench.client import Record
from cluster.bench.jobs.traffic import URGENT, Planned
from cluster.bench.report import Result
from cluster.bench.stats import (
    bootstrap_interval,
    mean,
    percentile,
    ratios,
    share,
    spread,
    spread_of_ratios,
)
from deploy.benchmarks.scenarios.turn import Turn

Times = NDArray[np.float64]

RATIOS = {
    "throughput": "tokens_per_second",
    "ttft_p50": "ttft_p50_ms",
    "ttft_p99": "ttft_p99_ms",
    "itl_p50": "itl_p50_ms",
    "itl_p99": "itl_p99_ms",
}
"""Metrics, keyed by the names of their ratios."""
_MORE_IS_BETTER = ("throughput",)


def figures(turn: Turn) -> Result:
    """Metrics of one run. Latencies are in milliseconds; failed requests miss their SLO."""
    pairs = list(zip(turn.planned, turn.records, strict=True))
    done = [record for _, record in pairs if not record.error]
    gaps = [gap for record in done for gap in record.itl]
    urgent = [pair for pair in pairs if pair[0].priority >= URGENT]
    first, last = turn.moments[:1], turn.moments[-1:]
    result: Result = {
        "completed": len(done),
        "failed": len(pairs) - len(done),
        "duration_s": turn.duration_s,
        "tokens_per_second": sum(record.output_len for record in done) / turn.duration_s,
        **_ttft("ttft", done),
        "itl_p50_ms": 1e3 * percentile(gaps, 50),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
        "slo_miss": slo_miss(pairs, turn.base_s),
        "hit_rate": share(sum(r.cached_tokens for r in done), sum(r.prompt_len for r in done)),
        "preemptions": sum(m.num_preemptions for m in last) - sum(m.num_preemptions for m in first),
        "queue_depth": mean([moment.num_waiting for moment in turn.moments]),
        "workers_busy": mean(
            [moment.num_busy_workers / max(1, moment.num_workers) for moment in turn.moments]
        ),
    }
    if urgent:
        result |= _ttft("urgent_ttft", [record for _, record in urgent if not record.error])
        result["urgent_slo_miss"] = slo_miss(urgent, turn.base_s)
    for priority in sorted({planned.priority for planned, _ in pairs}):
        mine = [r for planned, r in pairs if planned.priority == priority and not r.error]
        result[f"ttft_p99_ms_of_{priority}"] = 1e3 * percentile([r.ttft for r in mine], 99)
    return result


def slo_miss(pairs: Sequence[tuple[Planned, Record]], base_s: float) -> float:
    """Fraction of the requests whose first token arrived after the SLO, or never."""
    missed = [
        bool(record.error) or record.ttft > planned.slo_factor * base_s for planned, record in pairs
    ]
    return mean([float(miss) for miss in missed])


def compared(ours: Sequence[Result], other: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Ratios of rayfleet's metrics to the other fleet's, paired by round. `losing_rounds` lists the
    rounds in which rayfleet is worse.

    A ratio is NaN if its metric is 0 in any round. The gap between tokens is 0 if they arrive
    together.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, key in RATIOS.items():
        if any(turn[key] == 0.0 for turn in (*ours, *other)):
            found[f"{name}_ratio"] = {"median": math.nan, "losing_rounds": []}
            continue
        pairs = ratios([turn[key] for turn in ours], [turn[key] for turn in other])
        better = [ratio >= 1.0 if name in _MORE_IS_BETTER else ratio <= 1.0 for ratio in pairs]
        found[f"{name}_ratio"] = {
            **asdict(spread_of_ratios(pairs)),
            "losing_rounds": [number for number, good in enumerate(better) if not good],
        }
    gaps = [a["slo_miss"] - b["slo_miss"] for a, b in zip(ours, other, strict=True)]
    found["slo_miss_difference"] = {
        **asdict(spread(gaps)),
        "losing_rounds": [number for number, gap in enumerate(gaps) if gap > 0.0],
    }
    return found


def medians(turns: Sequence[Result]) -> Result:
    """Medians over the runs, for metrics that all runs have."""
    names = [name for name in turns[0] if all(name in turn for turn in turns)]
    return {name: percentile([float(turn[name]) for turn in turns], 50) for name in names}


def by_priority(ours: Sequence[Turn], other: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """Ratios of rayfleet's p99 TTFT to the other fleet's, keyed by priority.

    The p99 is computed over the requests of all rounds, because a single round has few requests of
    rare priorities. Intervals are bootstrapped over rounds.
    """
    ours_by, other_by = ([_ttfts(turn) for turn in turns] for turns in (ours, other))
    found: dict[str, dict[str, float]] = {}
    for priority in sorted(set().union(*ours_by) & set().union(*other_by)):
        times = [
            [turn.get(priority, np.empty(0)) for turn in turns] for turns in (ours_by, other_by)
        ]

        def ratio(rounds: Sequence[int], times: list[list[Times]] = times) -> float:
            mine, others = (np.concatenate([one[number] for number in rounds]) for one in times)
            return share(percentile(mine, 99.0), percentile(others, 99.0))

        low, high = bootstrap_interval(ratio, len(ours))
        found[str(priority)] = {
            "ratio": ratio(range(len(ours))),
            "interval_low": low,
            "interval_high": high,
            "count": sum(len(one) for one in times[0]),
        }
    return found


def _ttfts(turn: Turn) -> dict[int, Times]:
    found: dict[int, list[float]] = {}
    for planned, record in zip(turn.planned, turn.records, strict=True):
        if not record.error:
            found.setdefault(planned.priority, []).append(record.ttft)
    return {priority: np.array(times) for priority, times in found.items()}


def _ttft(name: str, done: Sequence[Record]) -> Result:
    times = [record.ttft for record in done]
    return {f"{name}_p{q}_ms": 1e3 * percentile(times, q) for q in (50, 99)}
