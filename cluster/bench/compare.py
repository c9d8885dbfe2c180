"""`rayfleet bench compare A B`: is B slower than A, as far as their samples can tell?

Takes results of `bench job`, of `bench serve --json --save-detailed`, and of vLLM's serving
benchmark with --save-detailed, whatever endpoint they were measured on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cluster.bench.report import Result, checks_json, exactly

Floats = NDArray[np.float64]
Verdict = Literal["regression", "improvement", "within tolerance", "not shown"]

_RESAMPLES = 2000
_FEW_RUNS = 3
"""With fewer runs per side only the requests of a run are drawn again."""
_WHOLE = "all"
"""The stage of a result that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """What to compare, and what counts as a difference."""

    a: str = ""
    """Result file, or a folder of several runs: what was before."""
    b: str = ""
    """The same of what is now."""
    tolerance: float = 0.02
    """A part by which B may be worse without being called a regression."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError("--tolerance must be in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Samples of one stage of one result file, in seconds, per request."""

    samples: Mapping[str, Floats]
    throughput: float


def run_compare(options: CompareOptions) -> Result:
    """B over A per stage and figure: ratio, 95 % interval, verdict. Raises ValueError for files
    that hold no samples or have no stage in common."""
    a, b = _read(options.a), _read(options.b)
    labels = [label for label in a if label in b]
    if not labels:
        raise ValueError(f"no stage is in both: {', '.join(a)} against {', '.join(b)}")
    rows = [row for label in labels for row in _rows(label, a[label], b[label], options.tolerance)]
    worse = [row for row in rows if row["verdict"] == "regression"]
    return {
        "a": options.a,
        "b": options.b,
        "runs_a": max(len(runs) for runs in a.values()),
        "runs_b": max(len(runs) for runs in b.values()),
        "tolerance": options.tolerance,
        "rows": rows,
        "failed": len(worse),
        "checks": checks_json([exactly("regressions", len(worse), "figures", 0)]),
    }


def _rows(label: str, a: list[_Run], b: list[_Run], tolerance: float) -> Iterator[dict[str, Any]]:
    for metric in ("ttft", "tpot", "e2el"):
        pools = [[run.samples[metric] for run in runs] for runs in (a, b)]
        if any(not sum(len(samples) for samples in pool) for pool in pools):
            continue
        for name, statistic in _STATISTICS.items():
            draws = [_draws(pool, statistic, seed) for seed, pool in enumerate(pools)]
            values = [statistic(np.concatenate(pool)) for pool in pools]
            yield _row(label, f"{name}_{metric}", values, draws, tolerance, more_is_better=False)
    if min(len(a), len(b)) >= _FEW_RUNS:
        rates = [np.array([run.throughput for run in runs]) for runs in (a, b)]
        draws = [_means(rate, seed) for seed, rate in enumerate(rates)]
        values = [float(rate.mean()) for rate in rates]
        yield _row(label, "output_throughput", values, draws, tolerance, more_is_better=True)


def _row(
    label: str,
    figure: str,
    values: Sequence[float],
    draws: Sequence[Floats],
    tolerance: float,
    *,
    more_is_better: bool,
) -> dict[str, Any]:
    ratios = draws[1] / np.maximum(draws[0], 1e-12)
    low, high = (float(end) for end in np.quantile(ratios, (0.025, 0.975)))
    worst, best = 1.0 + tolerance, 1.0 - tolerance
    verdict: Verdict = "not shown"
    if low > worst:
        verdict = "improvement" if more_is_better else "regression"
    elif high < best:
        verdict = "regression" if more_is_better else "improvement"
    elif best <= low and high <= worst:
        verdict = "within tolerance"
    unit = 1.0 if more_is_better else 1000.0
    return {
        "stage": label,
        "figure": figure if more_is_better else f"{figure}_ms",
        "a": values[0] * unit,
        "b": values[1] * unit,
        "b_over_a": values[1] / max(values[0], 1e-12),
        "low": low,
        "high": high,
        "verdict": verdict,
    }


def _draws(pool: Sequence[Floats], statistic: Callable[[Floats], float], seed: int) -> Floats:
    """The statistic of samples drawn again: whole runs where there are some, else requests.

    Requests of one run wait for each other, so runs tell more than requests do.
    """
    random = np.random.default_rng(seed)
    if len(pool) >= _FEW_RUNS:
        picks = random.integers(0, len(pool), (_RESAMPLES, len(pool)))
        return np.array([statistic(np.concatenate([pool[i] for i in row])) for row in picks])
    samples = np.concatenate(pool)
    return np.array([statistic(random.choice(samples, len(samples))) for _ in range(_RESAMPLES)])


def _means(values: Floats, seed: int) -> Floats:
    picks = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    means: Floats = values[picks].mean(axis=1)
    return means


def _mean(samples: Floats) -> float:
    return float(samples.mean())


def _p99(samples: Floats) -> float:
    place = min(int(0.99 * len(samples)), len(samples) - 1)
    return float(np.partition(samples, place)[place])


_STATISTICS: Mapping[str, Callable[[Floats], float]] = {"mean": _mean, "p99": _p99}


def _read(path: str) -> dict[str, list[_Run]]:
    """Runs by stage."""
    folder = Path(path)
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]
    found: dict[str, list[_Run]] = {}
    for file in files:
        try:
            result = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no result: {error}") from error
        stages = result.get("stages") or [{**result, "label": _WHOLE}]
        for stage in stages:
            found.setdefault(stage["label"], []).append(_run(stage, file))
    if not found:
        raise ValueError(f"{path} holds no .json file")
    return found


def _run(stage: Result, file: Path) -> _Run:
    if "ttfts" not in stage or "output_lens" not in stage:
        raise ValueError(f"{file} holds no samples: measure with --save-detailed")
    kept = [place for place, ttft in enumerate(stage["ttfts"]) if ttft > 0.0]  # others failed
    ttft = np.array([stage["ttfts"][place] for place in kept])
    if "e2els" in stage:
        e2el = np.array([stage["e2els"][place] for place in kept])
    else:
        e2el = ttft + np.array([sum(stage["itls"][place]) for place in kept])
    tokens = np.array([stage["output_lens"][place] for place in kept])
    several = tokens > 1
    return _Run(
        samples={
            "ttft": ttft,
            "e2el": e2el,
            "tpot": (e2el - ttft)[several] / (tokens[several] - 1),
        },
        throughput=float(stage.get("output_throughput", 0.0)),
    )
