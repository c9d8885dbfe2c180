"""`rayfleet bench versus`: two running endpoints under the same load, in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.bench.console import readable
from cluster.bench.report import Result, checks_json, count_errors, exactly, note
from cluster.bench.serve import ServeOptions, run_serve
from cluster.bench.stats import percentile
from cluster.bench.turns import take_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class VersusOptions:
    """Which endpoints to compare, where and how often."""

    a: ServeOptions
    """The one whose figures are above the line of ratios."""
    b: ServeOptions
    """The baseline: ratios are a / b."""
    concurrencies: tuple[int, ...] = field(default=(1, 8, 32), metadata={"separator": ","})
    """Requests at once, one cell for each number."""
    rounds: int = 3
    """Measurements of each endpoint in a cell, at least 3."""
    prompts_per_stream: int = 0
    """Requests of a cell are this many per stream; 0 uses --num-prompts everywhere."""
    metric: str = "output_throughput"
    """Field of the result that is compared; more is better."""
    pause_s: float = 2.0
    """Seconds before each measurement: threads of the other server may still spin for a while."""

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise ValueError("--rounds must be at least 3: fewer pairs show no spread")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise ValueError("--concurrencies needs numbers of at least 1, as in 1,8,32")


def run_versus(options: VersusOptions) -> Result:
    """Every concurrency in turn; within it both endpoints alternate over the rounds."""
    cells = [_cell(options, concurrency) for concurrency in options.concurrencies]
    failed = sum(cell["failed"] for cell in cells)
    errors = count_errors(cells)
    return {
        "a": options.a.base_url,
        "b": options.b.base_url,
        "metric": options.metric,
        "rounds": options.rounds,
        "cells": cells,
        "failed": failed,
        **({"errors": errors} if errors else {}),
        "checks": checks_json([exactly("failed_requests", failed, "requests", 0)]),
    }


def _cell(options: VersusOptions, concurrency: int) -> Result:
    variants = {
        name: partial(_run_side, options, name, side, concurrency)
        for name, side in (("a", options.a), ("b", options.b))
    }
    turns = take_turns(variants, options.rounds)
    runs = [run for name in variants for run in turns[name]]
    cell: Result = {"concurrency": concurrency, "failed": sum(run["failed"] for run in runs)}
    if cell["failed"]:
        cell["errors"] = count_errors(runs)
    metric = options.metric
    for name in variants:
        cell[name] = {
            metric: turns.median(name, lambda run: run[metric]),
            f"{metric}_rounds": turns.values(name, lambda run: run[metric]),
            **{key: _median(turns[name], key) for key in ("median_ttft_ms", "median_tpot_ms")},
        }
    if all(run[metric] > 0.0 for run in runs):  # else a round has no data
        cell["a_over_b"] = turns.comparison("a", "b", lambda run: run[metric])
    return cell


def _run_side(
    options: VersusOptions, name: str, side: ServeOptions, concurrency: int, number: int
) -> Result:
    per_stream = options.prompts_per_stream
    # Other prompts in every cell and round: no cache may know them. Both sides get the same ones,
    # unless both are one server, compared with itself to learn the noise.
    seed = side.seed + 7919 * concurrency + 2 * number
    if name == "b" and options.a.base_url.rstrip("/") == options.b.base_url.rstrip("/"):
        seed += 1
    time.sleep(options.pause_s)
    run = run_serve(
        replace(
            side,
            max_concurrency=concurrency,
            num_prompts=per_stream * concurrency if per_stream else side.num_prompts,
            seed=seed,
        )
    )
    note(
        f"{name} at {concurrency}, round {number}: {readable(run[options.metric])} "
        f"{options.metric}, {run['failed']} failed"
    )
    return run


def _median(runs: Sequence[Result], key: str) -> float | None:
    values = [run[key] for run in runs if key in run]
    return percentile(values, 50.0) if values else None
