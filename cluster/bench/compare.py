"""`rayfleet bench compare A B`: is B slower than A, as far as their runs can tell?

Takes results of `bench job`, of `bench serve --json --save-detailed`, and of vLLM's serving
benchmark with --save-detailed, whatever endpoint they were measured on.

A run counts as one measurement: its requests wait for each other and share the state of the
machine, so that thousands of them tell nothing of how much the next run will differ. Ratios are
those of the runs' geometric means, their intervals Student's t on logarithms: of pairs where runs
on both sides have the same seeds, else Welch's. With fewer than three runs on a side nothing is
shown. Verdicts hold for all rows together (Benjamini and Hochberg): among equals about one
comparison in twenty says anything at all, however many figures it has.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cluster.bench.report import (
    Result,
    checks_json,
    count_errors,
    describe_failures,
    exactly,
    note,
)
from cluster.bench.stats import Estimate, difference, estimate, mean, percentile

Verdict = Literal["regression", "improvement", "within tolerance", "not shown"]

_FEW_RUNS = 3
_ALPHA = 0.025
"""Part of the comparisons of equals in which something is called a regression; in as many,
something is called an improvement."""
_WHOLE = "all"
"""The stage of a result that has none."""
_THROUGHPUT = "output_throughput"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """What to compare, and what counts as a difference."""

    a: str = ""
    """Result file, or a folder of several runs: what was before."""
    b: str = ""
    """Result file, or a folder of several runs: what is now."""
    tolerance: float = 0.02
    """A part by which B may be worse without being called a regression."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError("--tolerance must be in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One stage of one result file."""

    figures: Mapping[str, float]
    """By name: latencies in milliseconds, and tokens per second; NaN without data."""
    seed: int | None
    """Seed of its prompts and arrivals; None where the file does not say."""
    errors: Mapping[str, int]
    """Failed requests by reason."""

    @property
    def completed(self) -> bool:
        """Whether any request did."""
        return not math.isnan(self.figures["mean_ttft_ms"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One figure of one stage."""

    stage: str
    figure: str
    a: float
    """Geometric mean over the runs."""
    b: float
    runs: str
    """How many, and whether they are pairs."""
    log_ratio: Estimate | None
    """Estimate of ln(B / A); None where there are too few runs."""

    def chance(self, *, worse: bool, tolerance: float) -> float:
        """How likely so large a difference would be if B were as far off as is tolerated."""
        assert self.log_ratio is not None
        if worse == (self.figure == _THROUGHPUT):
            return self.log_ratio.p_below(math.log1p(-tolerance))
        return self.log_ratio.p_above(math.log1p(tolerance))


def run_compare(options: CompareOptions) -> Result:
    """B over A per stage and figure: ratio, 95 % interval, verdict.

    Raises:
        ValueError: files hold no samples, or have no stage in common.
    """
    a, b = _read(options.a), _read(options.b)
    labels = [label for label in a if label in b]
    if not labels:
        raise ValueError(f"no stage is in both: {', '.join(a)} against {', '.join(b)}")
    rows = _judged([r for label in labels for r in _rows(label, a[label], b[label])], options)
    worse = sum(row["verdict"] == "regression" for row in rows)
    broken = [label for label in labels if _works(a[label]) and not _works(b[label])]
    for path, found in ((options.a, a), (options.b, b)):
        errors = count_errors({"errors": run.errors} for label in labels for run in found[label])
        if errors:
            note(f"{path}: {describe_failures(errors)}")
    runs_a, runs_b = (max(len(runs) for runs in found.values()) for found in (a, b))
    if min(runs_a, runs_b) < _FEW_RUNS:
        note(
            f"With fewer than {_FEW_RUNS} runs on a side it is not known how much runs differ, so "
            "nothing is shown. Measure A and B in turn several times, into a folder each."
        )
    return {
        "a": options.a,
        "b": options.b,
        "runs_a": runs_a,
        "runs_b": runs_b,
        "tolerance": options.tolerance,
        "rows": rows,
        "failed": worse + len(broken),
        "checks": checks_json(
            [
                exactly("regressions", worse, "figures", 0),
                exactly("stages_that_fail_in_b", len(broken), "stages", 0),
            ]
        ),
    }


def _works(runs: Sequence[_Run]) -> bool:
    return any(run.completed for run in runs)


def _rows(label: str, a: Sequence[_Run], b: Sequence[_Run]) -> Iterator[_Row]:
    """The figures that all runs in which anything completed have."""
    done = [[run for run in runs if run.completed] for runs in (a, b)]
    if not all(done):
        return
    pairs = _pairs(*done)
    for figure in done[0][0].figures:
        if not all(run.figures.get(figure, 0.0) > 0.0 for runs in done for run in runs):
            continue  # a request whose tokens all come in one event has no time between them
        logs = [np.log([run.figures[figure] for run in runs]) for runs in done]
        log_ratio = None
        if len(pairs) >= _FEW_RUNS:
            log_ratio = estimate([logs[1][j] - logs[0][i] for i, j in pairs])
        elif min(len(runs) for runs in done) >= _FEW_RUNS:
            log_ratio = difference(*logs)
        yield _Row(
            stage=label,
            figure=figure,
            a=math.exp(mean(logs[0])),
            b=math.exp(mean(logs[1])),
            runs=f"{len(pairs)} pairs" if pairs else f"{len(logs[0])} and {len(logs[1])}",
            log_ratio=log_ratio,
        )


def _pairs(a: Sequence[_Run], b: Sequence[_Run]) -> list[tuple[int, int]]:
    """Places of runs with the same seed, if both sides have the same ones, and each once."""
    places = [{run.seed: place for place, run in enumerate(runs)} for runs in (a, b)]
    if None in places[0] or places[0].keys() != places[1].keys():
        return []
    if len(places[0]) < len(a) or len(places[1]) < len(b):
        return []
    return [(place, places[1][seed]) for seed, place in places[0].items()]


def _judged(rows: Sequence[_Row], options: CompareOptions) -> list[dict[str, Any]]:
    """Rows as they are reported, with verdicts that take into account how many there are."""
    # Imported here: it takes a second, and the command line knows nothing yet.
    from scipy.stats import false_discovery_control

    measured = [row for row in rows if row.log_ratio is not None]
    verdicts: dict[tuple[str, str], Verdict] = {}
    sides: tuple[tuple[Verdict, bool], ...] = (("regression", True), ("improvement", False))
    for verdict, worse in sides:
        chances = [row.chance(worse=worse, tolerance=options.tolerance) for row in measured]
        adjusted = false_discovery_control(chances) if chances else []
        for row, chance in zip(measured, adjusted, strict=True):
            if chance <= _ALPHA:
                verdicts[row.stage, row.figure] = verdict
    return [_reported(row, verdicts.get((row.stage, row.figure)), options) for row in rows]


def _reported(row: _Row, verdict: Verdict | None, options: CompareOptions) -> dict[str, Any]:
    low = high = math.nan
    if row.log_ratio is not None:
        centre, half = row.log_ratio.value, row.log_ratio.half
        low, high = math.exp(centre - half), math.exp(centre + half)
        if verdict is None and 1.0 - options.tolerance <= low <= high <= 1.0 + options.tolerance:
            verdict = "within tolerance"
    return {
        "stage": row.stage,
        "figure": row.figure,
        "runs": row.runs,
        "a": row.a,
        "b": row.b,
        "b_over_a": row.b / row.a,
        "low": low,
        "high": high,
        "verdict": verdict or "not shown",
    }


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
        for stage in result.get("stages") or [{**result, "label": _WHOLE}]:
            run = _run({"seed": result.get("seed"), **stage}, file)
            found.setdefault(stage["label"], []).append(run)
    if not found:
        raise ValueError(f"{path} holds no .json file")
    if not any(run.completed for runs in found.values() for run in runs):
        errors = count_errors({"errors": run.errors} for runs in found.values() for run in runs)
        raise ValueError(
            f"{path} has no request that completed"
            + (f": {describe_failures(errors)}" if errors else "")
        )
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
    samples = {
        "ttft": ttft,
        "tpot": (e2el - ttft)[several] / (tokens[several] - 1),
        "e2el": e2el,
    }
    figures: dict[str, float] = {}
    for metric, seconds in samples.items():
        figures[f"mean_{metric}_ms"] = 1e3 * mean(seconds)
        figures[f"p99_{metric}_ms"] = 1e3 * percentile(seconds, 99.0)
    figures[_THROUGHPUT] = float(stage.get(_THROUGHPUT, math.nan))
    return _Run(figures=figures, seed=stage["seed"], errors=_errors(stage.get("errors", {})))


def _errors(found: Mapping[str, int] | Sequence[str]) -> Mapping[str, int]:
    """Ours are counted; vLLM's are a list of texts, empty where a request went well."""
    return found if isinstance(found, Mapping) else Counter(text for text in found if text)
