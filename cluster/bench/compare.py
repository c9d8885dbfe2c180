"""`rayfleet bench compare A B`: tests whether B is slower or faster than A, using several runs of
each.

A and B are either results or the URLs of two endpoints. Results are those of `bench job`, of `bench
serve --json --save-detailed`, or of vLLM's serving benchmark with --save-detailed. Endpoints are
measured alternately under the same load.

Each run is one observation: its requests wait for each other and share the state of the machine, so
more requests per run do not show how much runs vary. Ratios are those of the runs' geometric means.
Their confidence intervals are Student's t on logarithms, paired if the runs of both sides have the
same seeds, otherwise Welch's. With fewer than three runs on a side, there is no verdict. The false
discovery rate of all rows together is controlled (Benjamini and Hochberg): if A and B are equal,
about one report in twenty has a (false) verdict, regardless of the number of rows.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cluster.bench.console import readable
from cluster.bench.report import (
    Result,
    checks_json,
    count_errors,
    describe_failures,
    exactly,
    note,
)
from cluster.bench.serve import ServeOptions, run_serve
from cluster.bench.stats import Estimate, difference, estimate, mean, percentile
from cluster.bench.turns import take_turns

Verdict = Literal["regression", "improvement", "within tolerance", "not shown"]

_MIN_RUNS = 3
_ALPHA = 0.025
"""False discovery rate of regressions, and separately of improvements."""
_WHOLE = "all"
"""Name of the stage of a result without stages."""
_THROUGHPUT = "output_throughput"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """Options of `bench compare`: two results or endpoints, load and tolerance."""

    a: str
    """Result file, folder of result files, or URL of an endpoint: the baseline."""
    b: str
    """Result file, folder of result files, or URL of an endpoint: compared with A."""
    tolerance: float = 0.02
    """Relative difference up to which B is considered equal to A."""
    rounds: int = 5
    """Number of measurements of each endpoint per concurrency, at least 3. For URLs only."""
    concurrencies: tuple[int, ...] = field(default=(1, 8, 32), metadata={"separator": ","})
    """Numbers of concurrent requests, each measured in a separate stage. For URLs only."""
    prompts_per_stream: int = 0
    """Number of requests per stage, as a multiple of its concurrency; 0 uses --num-prompts for each
    stage. For URLs only."""
    pause_s: float = 2.0
    """Pause in seconds before each measurement, as threads of the other server may still be
    spinning. For URLs only."""
    b_model: str | None = None
    """Model name at B if it differs from --model. For URLs only."""
    b_api_key: str | None = None
    """API key for B if it differs from --api-key. For URLs only."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"--tolerance must be in [0, 1), got {self.tolerance}")
        if self.rounds < _MIN_RUNS:
            raise ValueError(
                f"--rounds must be at least {_MIN_RUNS} for confidence intervals, got {self.rounds}"
            )
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError(
                "--concurrencies must be a comma-separated list of positive integers, such as "
                f"1,8,32, got {list(self.concurrencies)}"
            )
        if _is_url(self.a) != _is_url(self.b):
            raise ValueError(f"A and B must be two results or two URLs, got {self.a} and {self.b}")

    @property
    def measures(self) -> bool:
        """Whether A and B are endpoints to measure."""
        return _is_url(self.a)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One run of a load: a stage of a result file, or a measurement."""

    figures: Mapping[str, float]
    """Latencies in ms and throughput in tokens/s, by name; NaN if there is no data."""
    seed: int | None
    """Seed of the run's prompts and arrivals; None if unknown."""
    errors: Mapping[str, int]
    """Failed requests by reason."""

    @property
    def completed(self) -> bool:
        """Whether any request completed."""
        return not math.isnan(self.figures["mean_ttft_ms"])


_Runs = dict[str, list[_Run]]
"""Runs by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One metric of one stage."""

    stage: str
    figure: str
    a: float
    """Geometric mean over A's runs."""
    b: float
    """Geometric mean over B's runs."""
    runs: str
    """Text with the number of runs, or of pairs of runs."""
    log_ratio: Estimate | None
    """Estimate of ln(B / A); None if there are too few runs."""

    def p_value(self, *, worse: bool, tolerance: float) -> float:
        """One-sided p-value of the hypothesis that B is worse (or better) than A by at most the
        tolerance."""
        assert self.log_ratio is not None
        if worse == (self.figure == _THROUGHPUT):
            return self.log_ratio.p_below(math.log1p(-tolerance))
        return self.log_ratio.p_above(math.log1p(tolerance))


def run_compare(options: CompareOptions, load: ServeOptions | None = None) -> Result:
    """Compares B with A: ratio, 95 % interval and verdict per stage and metric.

    Args:
        options: results or endpoints to compare.
        load: load for endpoints.

    Raises:
        ValueError: a file has no samples, the files have no stage in common, or no request
            completed.
    """
    if options.measures:
        a, b = _measure(options, load or ServeOptions())
    else:
        a, b = _read(options.a), _read(options.b)
    labels = [label for label in a if label in b]
    if not labels:
        raise ValueError(
            f"A and B have no stage in common ({', '.join(a)} and {', '.join(b)}): measure both "
            "with the same stages"
        )
    rows = _judged([r for label in labels for r in _rows(label, a[label], b[label])], options)
    worse = sum(row["verdict"] == "regression" for row in rows)
    broken = [label for label in labels if _works(a[label]) and not _works(b[label])]
    failed = 0
    for path, found in ((options.a, a), (options.b, b)):
        errors = _errors_of({label: found[label] for label in labels})
        failed += sum(errors.values()) if options.measures else 0
        if errors:
            note(f"{path}: {describe_failures(errors)}")
    runs_a, runs_b = (max(len(runs) for runs in found.values()) for found in (a, b))
    if min(runs_a, runs_b) < _MIN_RUNS:
        note(
            f"At least {_MIN_RUNS} runs per side are required for a verdict. Measure A and B "
            "alternately several times, and pass a folder of results for each."
        )
    return {
        "a": options.a,
        "b": options.b,
        "runs_a": runs_a,
        "runs_b": runs_b,
        "tolerance": options.tolerance,
        "rows": rows,
        "failed": worse + len(broken) + failed,
        "checks": checks_json(
            [
                exactly("regressions", worse, "figures", 0),
                exactly("stages_that_fail_in_b", len(broken), "stages", 0),
                *([exactly("failed_requests", failed, "requests", 0)] if options.measures else ()),
            ]
        ),
    }


def _measure(options: CompareOptions, load: ServeOptions) -> tuple[_Runs, _Runs]:
    """Measures both endpoints alternately at each concurrency; returns their runs by stage."""
    a = replace(load, base_url=options.a, save_detailed=True)
    b = replace(
        a,
        base_url=options.b,
        model=options.b_model or a.model,
        api_key=options.b_api_key or a.api_key,
    )
    found: tuple[_Runs, _Runs] = ({}, {})
    for concurrency in options.concurrencies:
        variants = {
            name: partial(_serve_round, options, name, side, concurrency)
            for name, side in (("a", a), ("b", b))
        }
        turns = take_turns(variants, options.rounds)
        for runs, name in zip(found, variants, strict=True):
            runs[f"{concurrency} at once"] = turns[name]
    for side, runs in zip((a, b), found, strict=True):
        _require_completed(side.base_url, runs)
    return found


def _serve_round(
    options: CompareOptions, name: str, side: ServeOptions, concurrency: int, number: int
) -> _Run:
    # New prompts in every stage and round, so that they are not in a prefix cache. Both sides get
    # the same prompts, unless a server is compared with itself to measure the noise.
    seed = side.seed + 7919 * concurrency + 2 * number
    if name == "b" and options.a.rstrip("/") == options.b.rstrip("/"):
        seed += 1
    time.sleep(options.pause_s)
    per_stream = options.prompts_per_stream
    result = run_serve(
        replace(
            side,
            max_concurrency=concurrency,
            num_prompts=per_stream * concurrency if per_stream else side.num_prompts,
            seed=seed,
        )
    )
    note(
        f"{name} at {concurrency}, round {number}: {readable(result[_THROUGHPUT])} {_THROUGHPUT}, "
        f"{result['failed']} failed"
    )
    return _run({**result, "seed": number}, side.base_url)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _works(runs: Sequence[_Run]) -> bool:
    return any(run.completed for run in runs)


def _rows(label: str, a: Sequence[_Run], b: Sequence[_Run]) -> Iterator[_Row]:
    """Rows of one stage, for metrics available in all runs with a completed request."""
    done = [[run for run in runs if run.completed] for runs in (a, b)]
    if not all(done):
        return
    pairs = _pairs(*done)
    for figure in done[0][0].figures:
        if not all(run.figures.get(figure, 0.0) > 0.0 for runs in done for run in runs):
            continue  # such as TPOT if all tokens of a request arrive in one event
        logs = [np.log([run.figures[figure] for run in runs]) for runs in done]
        log_ratio = None
        if len(pairs) >= _MIN_RUNS:
            log_ratio = estimate([logs[1][j] - logs[0][i] for i, j in pairs])
        elif min(len(runs) for runs in done) >= _MIN_RUNS:
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
    """Indices in `a` and `b` of runs with the same seed; empty unless both sides have the same
    seeds, each once."""
    places = [{run.seed: place for place, run in enumerate(runs)} for runs in (a, b)]
    if None in places[0] or places[0].keys() != places[1].keys():
        return []
    if len(places[0]) < len(a) or len(places[1]) < len(b):
        return []
    return [(place, places[1][seed]) for seed, place in places[0].items()]


def _judged(rows: Sequence[_Row], options: CompareOptions) -> list[dict[str, Any]]:
    """Rows of the report, with verdicts from adjusted p-values."""
    # Imported here, since the import takes a second.
    from scipy.stats import false_discovery_control

    measured = [row for row in rows if row.log_ratio is not None]
    verdicts: dict[tuple[str, str], Verdict] = {}
    sides: tuple[tuple[Verdict, bool], ...] = (("regression", True), ("improvement", False))
    for verdict, worse in sides:
        p_values = [row.p_value(worse=worse, tolerance=options.tolerance) for row in measured]
        adjusted = false_discovery_control(p_values) if p_values else []
        for row, p_value in zip(measured, adjusted, strict=True):
            if p_value <= _ALPHA:
                verdicts[row.stage, row.figure] = verdict
    return [_reported(row, verdicts.get((row.stage, row.figure)), options) for row in rows]


def _reported(row: _Row, verdict: Verdict | None, options: CompareOptions) -> dict[str, Any]:
    low = high = math.nan
    if row.log_ratio is not None:
        center, half = row.log_ratio.value, row.log_ratio.half
        low, high = math.exp(center - half), math.exp(center + half)
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


def _read(path: str) -> _Runs:
    """Runs by stage, from a result file or a folder of result files.

    Raises ValueError if there is no readable result, or no request completed.
    """
    folder = Path(path)
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]
    found: _Runs = {}
    for file in files:
        try:
            result = json.loads(file.read_text())
        except OSError as error:
            raise ValueError(f"cannot read result {file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"result {file} is not valid JSON: {error}") from error
        for stage in result.get("stages") or [{**result, "label": _WHOLE}]:
            run = _run({"seed": result.get("seed"), **stage}, file)
            found.setdefault(stage["label"], []).append(run)
    if not found:
        raise ValueError(f"no .json file in {path}: use a folder of results")
    _require_completed(path, found)
    return found


def _require_completed(origin: str, found: _Runs) -> None:
    """Raises ValueError if no request completed in any run."""
    if any(run.completed for runs in found.values() for run in runs):
        return
    errors = _errors_of(found)
    raise ValueError(
        f"{origin} has no completed requests" + (f": {describe_failures(errors)}" if errors else "")
    )


def _errors_of(found: _Runs) -> dict[str, int]:
    return count_errors({"errors": run.errors} for runs in found.values() for run in runs)


def _run(stage: Result, origin: object) -> _Run:
    """The run of a stage in a result; `origin` names the result in errors.

    Raises ValueError if it has no samples.
    """
    if "ttfts" not in stage or "output_lens" not in stage:
        raise ValueError(f"{origin} has no times per request: measure with --save-detailed")
    kept = [place for place, ttft in enumerate(stage["ttfts"]) if ttft > 0.0]  # the others failed
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
    """Failures by reason. vLLM's results have a text per request, empty if it completed."""
    return found if isinstance(found, Mapping) else Counter(text for text in found if text)
