"""`rayfleet bench overlap`: what queueing the next step behind the running one hides and gains.

Two engines of the same model, one at depth 0 and one at depth 1, take turns; the one that does
not run blocks. In each turn a fixed number of requests decodes for a fixed number of steps.

    hidden = 1 - (step wall at depth 1 - compute alone) / (step wall at depth 0 - compute alone)

Compute alone is rank 0's own time for a step at depth 0, when nothing runs beside it; the
denominator is depth 0's host time. All are read from clocks, so `hidden` also pays for what the
two processes take from each other, and may exceed 1 where a rank that never sleeps computes faster.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from cluster.bench.alternate import alternate
from cluster.bench.report import Check, Result, at_least, checks_json, note
from cluster.bench.stats import percentile, ratios, spread
from worker.engine.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.factory import create_executor
from worker.engine.timeline import StepRecord
from worker.wire.messages import Abort, Submit
from worker.wire.sampling import SamplingParams

LEAST_PAIRS = 10
PLOTTED_STEPS = 5
_GATEWAY = "bench"
_SETTLING_STEPS = 4
"""Steps between the last first token and the first step that counts."""
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
        if self.pairs < 1 or self.steps < PLOTTED_STEPS or self.input_len < 1:
            raise ValueError(f"--pairs must be at least 1, --steps {PLOTTED_STEPS}, --input-len 1")
        if not self.running or min(self.running) < 1:
            raise ValueError("--running needs numbers of at least 1, such as 1,8,32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One engine's steps at one number of requests, per step in microseconds."""

    wall_us: float
    phases_us: dict[str, float]
    """Of StepTimes."""
    records: tuple[StepRecord, ...]
    """The last steps that counted."""

    @property
    def rank_us(self) -> float:
        """Rank 0's own time."""
        return self.compute_us + self.phases_us["prepare"]

    @property
    def compute_us(self) -> float:
        """The model and the draw alone."""
        return self.phases_us["forward"] + self.phases_us["sample"]


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
    with ExitStack() as stack:
        engines = [stack.enter_context(_Engine(options, depth)) for depth in (0, 1)]
        for running in options.running:
            arms = {str(engine.depth): partial(engine.turn, running) for engine in engines}
            alternate(arms, 1)  # warms up
            turns = alternate(arms, options.pairs)
            figures = summarise(running, turns["0"], turns["1"])
            checks += _checks(running, figures)
            result |= figures
            note(f"{running} running: {figures[f'ratio_{running}']:.3f} times depth 0's speed")
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
            "ratio": asdict(spread(gains)),
        },
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


class _Engine:
    """One engine as `LLM` has it, driven step by step."""

    def __init__(self, options: OverlapOptions, depth: int) -> None:
        self.depth = depth
        self._options = options
        config = replace(options.engine, overlap_depth=depth, max_num_seqs=max(options.running))
        self._directory = tempfile.mkdtemp(prefix="rf-")
        self._executor = create_executor(config, self._directory, spawn_peers=True)
        try:
            self._core = EngineCore(config, self._executor.start(), self._executor, time.monotonic)
        except BaseException:
            self.close()
            raise
        self._ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()

    def turn(self, running: int, number: int) -> Turn:
        """Brings `running` requests to decode, and times their steps."""
        steps = self._options.steps
        submitted = [self._submit(number, index) for index in range(running)]
        waiting = set(submitted)
        while waiting:
            for delta in self._core.step().deltas.get(_GATEWAY, ()):
                waiting.discard(delta.request_id)
        self._step(_SETTLING_STEPS)
        before, start = self._core.timeline.totals(), time.monotonic()
        self._step(steps)
        elapsed, after = time.monotonic() - start, self._core.timeline.totals()
        records = tuple(self._core.timeline.records)[-PLOTTED_STEPS:]
        for request_id in submitted:
            self._core.abort(Abort(request_id=request_id))
        while self._core.has_work():
            self._core.step()
        count = after.num_steps - before.num_steps
        assert count == steps, f"{count} steps were completed in {steps} turns"
        phases = {
            name: (value - getattr(before, name)) / steps * 1e6
            for name, value in msgspec.structs.asdict(after).items()
            if name != "num_steps"
        }
        return Turn(wall_us=elapsed / steps * 1e6, phases_us=phases, records=records)

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._encoder.encode(self._core.step())  # as the worker does for its front

    def _submit(self, number: int, index: int) -> str:
        request_id = str(next(self._ids))
        rng = np.random.default_rng((number, index))
        prompt = rng.integers(0, self._core.info.vocab_size, self._options.input_len)
        # More than it takes: those that get their first token early run while others wait.
        max_tokens = 2 * self._options.steps + 64
        self._core.add(
            Submit(
                request_id=request_id,
                gateway_id=_GATEWAY,
                prompt=prompt.astype("<i4").tobytes(),
                sampling=SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0
                ),
            )
        )
        return request_id

    def close(self) -> None:
        self._executor.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
