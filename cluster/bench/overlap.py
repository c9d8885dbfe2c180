"""`rayfleet bench overlap`: what queueing the next step behind the running one hides and gains.

Two engines of the same model, one at depth 0 and one at depth 1, take turns; the one that does
not run blocks. In each turn a fixed number of requests decodes for a fixed number of steps.

    hidden = 1 - (step wall at depth 1 - compute alone) / (step wall at depth 0 - compute alone)

Compute alone is rank 0's own time for a step at depth 0, when nothing runs beside it; the
denominator is depth 0's host time. All are read from clocks, so `hidden` also pays for what the
two processes take from each other, and may exceed 1 where a rank that never sleeps computes faster.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

from cluster.bench.alternate import alternate
from cluster.bench.decode import KEPT_RECORDS, DecodeEngine, Turn
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, note
from cluster.bench.stats import percentile, ratios, spread, spread_of_ratios
from worker.config import EngineConfig
from worker.core.executor_factory import uses_cuda

LEAST_PAIRS = 10
_MOST_IDLE_US, _MOST_IDLE_SHARE = 100.0, 0.03
"""On CUDA, of a step at depth 1."""
_GOALS = {"hidden": {8: 0.8, 32: 0.8}, "ratio": {1: 0.98, 8: 1.03, 32: 1.03}}


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapOptions:
    """What runs; `engine.overlap_depth` and `engine.max_num_seqs` are set by the benchmark."""

    engine: EngineConfig
    running: tuple[int, ...] = (1, 8, 32)
    """Numbers of requests that decode at once."""
    pairs: int = LEAST_PAIRS
    steps: int = 100
    """Steps per turn."""
    input_len: int = 16
    plot: str | None = None
    """PNG file of the two timelines."""

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.steps < KEPT_RECORDS or self.input_len < 1:
            raise ValueError(f"--pairs must be at least 1, --steps {KEPT_RECORDS}, --input-len 1")
        if not self.running or min(self.running) < 1:
            raise ValueError("--running needs numbers of at least 1, such as 1,8,32")


def run_overlap(options: OverlapOptions) -> Result:
    """Measures all numbers of requests, draws the timelines of the largest where asked to."""
    if options.plot is not None:
        # Imported here, but before the measurement: the extra `plots` may be missing.
        from cluster.bench.overlap_plot import draw_timelines
    result: Result = {
        "model": options.engine.model,
        "pairs": options.pairs,
        "steps": options.steps,
    }
    checks: list[Check] = []
    idle: list[tuple[float, float]] = []
    with ExitStack() as stack:
        engines = {depth: stack.enter_context(_engine(options, depth)) for depth in (0, 1)}
        for running in options.running:
            arms = {str(depth): partial(engine.turn, running) for depth, engine in engines.items()}
            alternate(arms, 1)  # warms up
            turns = alternate(arms, options.pairs)
            figures = summarise(running, turns["0"], turns["1"])
            checks += _checks(running, figures)
            idle.append((figures[f"idle_gap_us_{running}"], figures[f"idle_share_{running}"]))
            result |= figures
            note(f"{running} running: {figures[f'ratio_{running}']:.3f} times depth 0's speed")
    if uses_cuda(options.engine):
        checks += idle_checks(idle)
    if options.plot is not None:
        draw_timelines([turns[depth][-1].records for depth in ("0", "1")], options.plot)
        result["plot"] = options.plot
    return {**result, "checks": checks_json(checks)}


def summarise(running: int, serial: list[Turn], overlapped: list[Turn]) -> Result:
    """Figures of paired turns: medians over the pairs, with their spread."""
    pairs = list(zip(serial, overlapped, strict=True))
    hidden = [1 - (b.wall_us - a.rank_us) / (a.wall_us - a.rank_us) for a, b in pairs]
    strict = [1 - (b.wall_us - a.compute_us) / (a.wall_us - a.compute_us) for a, b in pairs]
    gains = ratios([a.wall_us for a in serial], [b.wall_us for b in overlapped])
    return {
        f"hidden_{running}": percentile(hidden, 50.0),
        f"hidden_with_prepare_{running}": percentile(strict, 50.0),
        f"ratio_{running}": percentile(gains, 50.0),
        f"spread_{running}": {
            "hidden": asdict(spread(hidden)),
            "hidden_with_prepare": asdict(spread(strict)),
            "ratio": asdict(spread_of_ratios(gains)),
        },
        f"idle_gap_us_{running}": percentile([turn.idle_us for turn in overlapped], 50.0),
        f"idle_share_{running}": percentile(
            [turn.idle_us / turn.wall_us for turn in overlapped], 50.0
        ),
        f"depth_0_{running}": _per_step(running, serial),
        f"depth_1_{running}": _per_step(running, overlapped),
    }


def _per_step(running: int, turns: list[Turn]) -> Result:
    """Median microseconds per step."""
    wall = percentile([turn.wall_us for turn in turns], 50.0)
    host = percentile([turn.wall_us - turn.rank_us for turn in turns], 50.0)
    phases = {
        f"{name}_us": percentile([turn.phases_us[name] for turn in turns], 50.0)
        for name in turns[0].phases_us
    }
    return {"tokens_per_second": running * 1e6 / wall, "wall_us": wall, "host_us": host, **phases}


def _checks(running: int, figures: Result) -> list[Check]:
    return [
        at_least(f"{name}_{running}", figures[f"{name}_{running}"], "", goals[running])
        for name, goals in _GOALS.items()
        if running in goals
    ]


def idle_checks(idle: list[tuple[float, float]]) -> list[Check]:
    """Of a device at depth 1, from (microseconds, share of the step) per number of requests."""
    return [
        at_most("idle_gap_us", max(gap for gap, _ in idle), "us", _MOST_IDLE_US),
        at_most("idle_share", max(share for _, share in idle), "", _MOST_IDLE_SHARE),
    ]


def _engine(options: OverlapOptions, depth: int) -> DecodeEngine:
    config = replace(options.engine, overlap_depth=depth, max_num_seqs=max(options.running))
    return DecodeEngine(config, steps=options.steps, input_len=options.input_len)
