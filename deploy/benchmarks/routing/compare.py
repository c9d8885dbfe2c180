"""Benchmark `router`: simulates all routers on all workloads, with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from cluster.bench.machine import versions
from cluster.bench.report import Result, at_least, at_most, checks_json, note
from cluster.bench.stats import estimate, mean
from cluster.bench.traces import find_traces
from deploy.benchmarks.routing.figures import (
    Figures,
    figures,
    pooled_hit_rate,
    ratio_to_best,
)
from deploy.benchmarks.routing.result_cache import ResultCache, routing_digest, simulation_digest
from deploy.benchmarks.routing.routers import OWN, ROUTERS, Entry, Settings, find_routers
from deploy.benchmarks.routing.simulation import Outcome, Simulation
from deploy.benchmarks.routing.workload import Workload
from deploy.benchmarks.routing.workloads import Maker, workloads

_TUNING_SEED = 10_000
"""Seed of the data for tuning settings; differs from the reported seeds."""
_TUNING_SCALE = 0.5
_MEAN_GOAL = 1.02
_P99_GOAL = 1.10
_P99_SHARE = 0.8
_HIT_GOAL = 0.95
_PANELS = {
    "mean_ttft_s": ("mean TTFT over the best", True),
    "p99_ttft_s": ("p99 TTFT over the best", True),
}
_PACKAGES = ("ray", "ai-dynamo-runtime", "numpy")
"""Packages whose versions are reported because the metrics depend on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimOptions:
    """Options of the simulation."""

    policies: tuple[str, ...] = field(default=(), metadata={"flag": "--policy"})
    """Router to simulate: a routing policy of rayfleet, ray-prefix (Ray Serve LLM's prefix router),
    dynamo (NVIDIA Dynamo's router) or sglang-cache-aware (the algorithm of sglang-router's
    cache_aware). Can be repeated. Default: all but sglang-cache-aware; with --agents, only the
    default policy."""
    workloads: tuple[str, ...] = field(default=(), metadata={"flag": "--workload"})
    """Workload to simulate. Can be repeated. Default: all."""
    seeds: int = 5
    """Number of simulations per router and workload, each with its own seed."""
    first_seed: int = 1
    """Seed of the first simulation; later ones have consecutive seeds."""
    scale: float = 1.0
    """Factor for the number of requests; published results use 1."""
    traces: str = ""
    """Folder with Mooncake's conversation_trace.jsonl and synthetic_trace.jsonl; if not given,
    these workloads are skipped."""
    sweep: bool = True
    """Also run each configurable router with the best settings of a fixed grid, selected with other
    seeds."""
    resume: str = ""
    """File to which the result of each finished simulation is appended. Later runs of the same code
    reuse these results."""
    plot: str = ""
    """PNG file for the ratios of all routers; default: no plot."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {self.seeds}")
        if self.scale <= 0.0:
            raise ValueError(f"--scale must be greater than 0, got {self.scale}")
        if self.policies and (OWN not in self.policies or len(self.policies) < 2):
            raise ValueError(
                f"--policy must include {OWN} and at least one other policy, got "
                f"{', '.join(self.policies)}"
            )


def run_router_sim(options: SimOptions) -> Result:
    """Measures times to first token and hit rates by workload and router, and checks rayfleet's
    ratios to the best router.

    Raises:
        ValueError: a workload is unknown.
    """
    folder = find_traces(options.traces) if options.traces else None
    entries, notes = find_routers(options.policies or ROUTERS)
    if folder is None:
        where = f"in {options.traces}" if options.traces else "without --traces FOLDER"
        notes.append(f"skipping trace workloads: no conversation_trace.jsonl {where}")
    for text in notes:
        note(text)
    makers = workloads(options.scale, folder)
    small = workloads(options.scale * _TUNING_SCALE, folder)
    names = options.workloads or tuple(makers)
    if unknown := [name for name in names if name not in makers]:
        raise ValueError(
            f"--workloads: unknown workloads {', '.join(unknown)}: choose from {', '.join(makers)}"
        )
    known = ResultCache(options.resume)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Any] = {}
    for name in names:
        tuning = small[name] if options.sweep else None
        runs = _runs(name, entries, makers[name], tuning, options, known)
        rows += _rows(name, runs)
        ratios[name] = _ratios(runs)
        note(
            f"{name}: TTFT relative to the best other router: mean "
            f"{ratios[name]['mean_ttft_ratio']:.3f} ({ratios[name]['best_mean']}), p99 "
            f"{ratios[name]['p99_ttft_ratio']:.3f} ({ratios[name]['best_p99']})"
        )
    result: Result = {
        "seeds": options.seeds,
        "first_seed": options.first_seed,
        "scale": options.scale,
        "versions": {**versions(_PACKAGES), "code": routing_digest()},
        "notes": notes,
        **_worst(ratios),
        "workloads": ratios,
        "rows": rows,
    }
    if options.plot:
        from deploy.benchmarks.scenarios.plots import draw_bars

        draw_bars(_over_the_best(rows), "policy", _PANELS, options.plot, own=OWN)
    return result


def _over_the_best(rows: Sequence[Result]) -> list[Result]:
    """Rows with times relative to the lowest of each workload."""
    best = {
        (row["workload"], name): min(
            other[name] for other in rows if other["workload"] == row["workload"]
        )
        for row in rows
        for name in _PANELS
    }
    return [
        {**row, **{name: row[name] / best[row["workload"], name] for name in _PANELS}}
        for row in rows
    ]


@dataclass(kw_only=True, slots=True)
class _Runs:
    """One router's simulations of a workload."""

    settings: Settings
    figures: list[Figures]

    @property
    def bound(self) -> float:
        """Mean pooled hit rate, computed only in simulations of `OWN`."""
        return mean([one.pooled_hit_rate for one in self.figures])


def _runs(
    name: str,
    entries: Sequence[Entry],
    make: Maker,
    tuning: Maker | None,
    options: SimOptions,
    known: ResultCache,
) -> dict[str, _Runs]:
    """Simulations of a workload, keyed by router; tuned routers have separate entries."""

    def take(entry: Entry, settings: Settings, seed: int, maker: Maker, scale: float) -> Figures:
        run = {
            "workload": name,
            "policy": entry.name,
            "settings": settings,
            "seed": seed,
            "scale": scale,
            "code": simulation_digest() if entry.foreign else routing_digest(),
        }
        return known.take(run, lambda: _figures(entry, settings, seed, maker))

    runs: dict[str, _Runs] = {}
    for entry in entries:
        sets: dict[str, Settings] = {entry.name: {}}
        if entry.grid and tuning is not None:
            scale = options.scale * _TUNING_SCALE
            tried = [take(entry, one, _TUNING_SEED, tuning, scale).mean_ttft for one in entry.grid]
            sets[f"{entry.name} (tuned)"] = entry.grid[int(np.argmin(tried))]
        for label, settings in sets.items():
            runs[label] = _Runs(
                settings=settings,
                figures=[
                    take(entry, settings, seed, make, options.scale)
                    for seed in range(options.first_seed, options.first_seed + options.seeds)
                ],
            )
    return runs


def _figures(entry: Entry, settings: Settings, seed: int, make: Maker) -> Figures:
    workload = make(seed)
    outcomes = simulate(workload, entry, settings, seed)
    found = figures(outcomes)
    if entry.name != OWN:
        return found
    shape = workload.fleet
    bound = pooled_hit_rate(outcomes, shape.page_size, shape.pooled_pages)
    return found._replace(pooled_hit_rate=bound)


def simulate(workload: Workload, entry: Entry, settings: Settings, seed: int) -> list[Outcome]:
    """Outcomes of a workload under a router with the given settings."""
    return Simulation(workload, partial(entry.create, settings, seed)).run()


def _rows(workload: str, runs: Mapping[str, _Runs]) -> list[dict[str, Any]]:
    bound = runs[OWN].bound
    rows = []
    for name, run in runs.items():
        mean_ttft = estimate([one.mean_ttft for one in run.figures])
        p99 = estimate([one.p99_ttft for one in run.figures])
        rows.append(
            {
                "workload": workload,
                "policy": name,
                "mean_ttft_s": mean_ttft.value,
                "mean_ci": mean_ttft.half,
                "p50_ttft_s": mean([one.p50_ttft for one in run.figures]),
                "p99_ttft_s": p99.value,
                "p99_ci": p99.half,
                "hit_rate": mean([one.hit_rate for one in run.figures]),
                "pooled_hit_rate": bound,
                "settings": ", ".join(f"{k}={v}" for k, v in run.settings.items()),
            }
        )
    return rows


def _ratios(runs: Mapping[str, _Runs]) -> dict[str, Any]:
    def series(select: Callable[[Figures], float]) -> dict[str, list[float]]:
        return {name: [select(one) for one in run.figures] for name, run in runs.items()}

    mean_ttft, mean_half, mean_best = ratio_to_best(series(lambda one: one.mean_ttft), OWN)
    p99, p99_half, p99_best = ratio_to_best(series(lambda one: one.p99_ttft), OWN)
    hit = mean([one.hit_rate for one in runs[OWN].figures])
    bound = runs[OWN].bound
    return {
        "mean_ttft_ratio": mean_ttft,
        "mean_ttft_ratio_ci": mean_half,
        "best_mean": mean_best,
        "p99_ttft_ratio": p99,
        "p99_ttft_ratio_ci": p99_half,
        "best_p99": p99_best,
        "hit_of_pooled": hit / bound if bound else 1.0,
    }


def _worst(ratios: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    worst = max(one["mean_ttft_ratio"] for one in ratios.values())
    p99 = max(one["p99_ttft_ratio"] for one in ratios.values())
    near = sum(one["p99_ttft_ratio"] <= _P99_GOAL for one in ratios.values()) / len(ratios)
    hit = min(one["hit_of_pooled"] for one in ratios.values())
    checks = [
        at_most("worst_mean_ttft_ratio", worst, "x", _MEAN_GOAL),
        replace(
            at_most("worst_p99_ttft_ratio", p99, "x", _P99_GOAL),
            goal=f"<= {_P99_GOAL:g} on {_P99_SHARE:.0%} of the workloads",
            holds=near >= _P99_SHARE,
        ),
        at_least("p99_near_best", near, "of workloads", _P99_SHARE),
        at_least("worst_hit_of_pooled", hit, "of the pooled cache's", _HIT_GOAL),
    ]
    return {
        "worst_mean_ttft_ratio": worst,
        "worst_p99_ttft_ratio": p99,
        "mean_losers": [n for n, one in ratios.items() if one["mean_ttft_ratio"] > _MEAN_GOAL],
        "p99_losers": [n for n, one in ratios.items() if one["p99_ttft_ratio"] > _P99_GOAL],
        "checks": checks_json(checks),
    }
