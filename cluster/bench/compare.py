"""`rayfleet bench compare A B`: is B slower than A, as far as their runs can tell?

Takes results of `bench job`, of `bench serve --json --save-detailed`, and of vLLM's serving
benchmark with --save-detailed, whatever endpoint they were measured on; or the URLs of two
endpoints, which are measured here: the same load on both, in turn.

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

_FEW_RUNS = 3
_ALPHA = 0.025
"""Part of the comparisons of equals in which something is called a regression; in as many,
something is called an improvement."""
_WHOLE = "all"
"""The stage of a result that has none."""
_THROUGHPUT = "output_throughput"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """Options of `bench compare`: two results or endpoints, and what counts as a difference."""

    a: str
    """Result file, a folder of several runs, or an endpoint's URL: what was before."""
    b: str
    """Result file, a folder of several runs, or an endpoint's URL: what is now."""
    tolerance: float = 0.02
    """A part by which B may be worse without being called a regression."""
    rounds: int = 5
    """Measurements of each endpoint at each number of requests at once, at least 3; with URLs."""
    concurrencies: tuple[int, ...] = field(default=(1, 8, 32), metadata={"separator": ","})
    """Numbers of requests at once, a stage for each; with URLs."""
    prompts_per_stream: int = 0
    """Requests of a stage per stream; 0 uses --num-prompts everywhere; with URLs."""
    pause_s: float = 2.0
    """Seconds before each measurement: threads of the other server may still spin; with URLs."""
    b_model: str | None = None
    """Model name at B, where it is another than at A; with URLs."""
    b_api_key: str | None = None
    """API key for B, where it is another than for A; with URLs."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError("--tolerance must be in [0, 1)")
        if self.rounds < _FEW_RUNS:
            raise ValueError(f"--rounds must be at least {_FEW_RUNS}: fewer pairs show no spread")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError("--concurrencies needs numbers of at least 1, as in 1,8,32")
        if _is_url(self.a) != _is_url(self.b):
            raise ValueError(f"compare two results or two URLs, not {self.a} with {self.b}")

    @property
    def measures(self) -> bool:
        """Whether endpoints are to be measured first."""
        return _is_url(self.a)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One stage of one result file."""

    figures: Mapping[str, float]
    """Figures by name: latencies in milliseconds, and tokens per second; NaN without data."""
    seed: int | None
    """Seed of its prompts and arrivals; None where the file does not say."""
    errors: Mapping[str, int]
    """Failed requests by reason."""

    @property
    def completed(self) -> bool:
        """Whether any request did."""
        return not math.isnan(self.figures["mean_ttft_ms"])


_Runs = dict[str, list[_Run]]
"""Runs by stage."""


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


def run_compare(options: CompareOptions, load: ServeOptions | None = None) -> Result:
    """B over A per stage and figure: ratio, 95 % interval, verdict.

    Args:
        options: what to compare.
        load: what endpoints are measured with, where these are compared.

    Raises:
        ValueError: files hold no samples, or have no stage in common; an endpoint answers nothing.
    """
    if options.measures:
        a, b = _measure(options, load or ServeOptions())
    else:
        a, b = _read(options.a), _read(options.b)
    labels = [label for label in a if label in b]
    if not labels:
        raise ValueError(f"no stage is in both: {', '.join(a)} against {', '.join(b)}")
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
    """Both endpoints' runs by stage: at each number of requests at once they take turns."""
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
        _refuse_nothing(side.base_url, runs)
    return found


def _serve_round(
    options: CompareOptions, name: str, side: ServeOptions, concurrency: int, number: int
) -> _Run:
    # Other prompts in every stage and round: no cache may know them. Both sides get the same ones,
    # unless both are one server, compared with itself to learn the noise.
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


def _read(path: str) -> _Runs:
    """Runs by stage."""
    folder = Path(path)
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]
    found: _Runs = {}
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
    _refuse_nothing(path, found)
    return found


def _refuse_nothing(origin: str, found: _Runs) -> None:
    """Raises ValueError where no request completed in any run."""
    if any(run.completed for runs in found.values() for run in runs):
        return
    errors = _errors_of(found)
    raise ValueError(
        f"{origin} has no request that completed"
        + (f": {describe_failures(errors)}" if errors else "")
    )


def _errors_of(found: _Runs) -> dict[str, int]:
    return count_errors({"errors": run.errors} for runs in found.values() for run in runs)


def _run(stage: Result, origin: object) -> _Run:
    """One run of a stage; `origin` is where it was found."""
    if "ttfts" not in stage or "output_lens" not in stage:
        raise ValueError(f"{origin} holds no samples: measure with --save-detailed")
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
