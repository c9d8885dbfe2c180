"""Benchmark `overlap`: host time hidden by overlapping steps, and the resulting speedup.

Two engines with the same model, at overlap depths 0 and 1, take turns. In each run, a fixed number
of requests decodes for a fixed number of steps.

    hidden = 1 - (step wall at depth 1 - rank time) / (step wall at depth 0 - rank time)

Rank time is rank 0's own time for a step at depth 0, when nothing else runs. The denominator is the
host time at depth 0. All times are measured, so `hidden` is lower if the coordinator and the rank
slow each other down, and may exceed 1 if a rank that never sleeps computes faster.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Final

from cluster.bench.report import Check, Result, checks_json, note
from cluster.bench.stats import spread
from cluster.bench.turns import Turns, take_turns
from deploy.benchmarks.ab.options import OverlapOptions
from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.engine import DecodeTurn, Engines, decode_tokens
from deploy.benchmarks.idle import idle_checks
from worker.core.executor_factory import uses_cuda

_PRESET: Final = PRESETS["overlap"]


def run(options: OverlapOptions) -> Result:
    """Measures each number of requests; with --plot, plots the timelines of the last one."""
    if options.plot:
        # Imported before the measurement, to fail early if the extra `plots` is not installed.
        from deploy.benchmarks.scenarios.plots import draw_timelines
    result: Result = {
        "model": options.engine.model,
        "pairs": options.pairs,
        "steps": options.steps,
    }
    checks: list[Check] = []
    idle: list[tuple[float, float]] = []
    sizes = {"steps": options.steps, "input_len": options.input_len}
    with Engines() as engines:
        for running in options.running:
            variants = {}
            for depth in _PRESET.variants:
                config = _PRESET.config(depth, options.engine, max_num_seqs=max(options.running))
                engine = engines.get(config, request_tokens=decode_tokens(**sizes))
                variants[depth] = partial(engine.decode, running, **sizes)
            turns = take_turns(variants, options.pairs, warmups=1)
            figures = summarise(running, turns)
            checks += _PRESET.checks(figures)
            idle.append((figures[f"idle_gap_us_{running}"], figures[f"idle_share_{running}"]))
            result |= figures
            note(f"{running} running: {figures[f'ratio_{running}']:.3f} times the speed of depth 0")
    if uses_cuda(options.engine):
        checks += idle_checks(idle)
    if options.plot:
        draw_timelines([turns[depth][-1].records for depth in ("0", "1")], options.plot)
        result["plot"] = options.plot
    return {**result, "checks": checks_json(checks)}


def summarise(running: int, turns: Turns[DecodeTurn]) -> Result:
    """Metrics of runs at depths "0" and "1": medians over the pairs, with confidence intervals."""
    pairs = turns.pairs("0", "1")
    spreads = {
        "hidden": spread([1 - (b.wall_us - a.rank_us) / (a.wall_us - a.rank_us) for a, b in pairs]),
        "hidden_with_prepare": spread(
            [1 - (b.wall_us - a.compute_us) / (a.wall_us - a.compute_us) for a, b in pairs]
        ),
        "ratio": turns.ratio("0", "1", lambda turn: turn.wall_us),
    }
    return {
        **{f"{name}_{running}": found.median for name, found in spreads.items()},
        f"spread_{running}": {name: asdict(found) for name, found in spreads.items()},
        f"idle_gap_us_{running}": turns.median("1", lambda turn: turn.idle_us),
        f"idle_share_{running}": turns.median("1", lambda turn: turn.idle_us / turn.wall_us),
        **{f"depth_{depth}_{running}": _per_step(running, turns, depth) for depth in ("0", "1")},
    }


def _per_step(running: int, turns: Turns[DecodeTurn], depth: str) -> Result:
    """Median step times in microseconds, and tokens per second."""
    wall = turns.median(depth, lambda turn: turn.wall_us)
    phases = {
        f"{name}_us": turns.median(depth, lambda turn, name=name: turn.phases_us[name])  # type: ignore[misc]  # a default binds the name
        for name in turns[depth][0].phases_us
    }
    host = turns.median(depth, lambda turn: turn.wall_us - turn.rank_us)
    return {"tokens_per_second": running * 1e6 / wall, "wall_us": wall, "host_us": host, **phases}
