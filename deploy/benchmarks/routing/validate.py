"""Benchmark `router --validate`: time to first token of a simulated worker and of a real engine.

The step-time model is fitted to the engine's steps on other prompts. Then both the engine, in real
time, and a simulated worker with the same limits get the same requests at the same times. The
engine runs without overlap, which the simulation does not model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.bench.report import Result, at_most, checks_json
from cluster.bench.stats import mean, percentile
from deploy.benchmarks.engine import GATEWAY, BenchEngine
from deploy.benchmarks.routing.compare import simulate
from deploy.benchmarks.routing.routers import find_routers
from deploy.benchmarks.routing.workload import Arrival, FleetShape, Workload
from worker.config import EngineConfig
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams
from worker.protocol.step_time import StepCosts, StepTimeModel

_GOAL = 0.15
_MAX_NUM_SEQS = 16
_BUDGET = 256
_PREFIX = 256
"""Tokens in the prefix that requests on one subject share."""
_SUBJECTS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateOptions:
    """Options of `router --validate`."""

    model: str = ""
    """Checkpoint folder; default: the demo model."""
    requests: int = 300
    """Number of requests in the comparison, and in the calibration before it."""
    utilization: float = 0.6
    """Target utilization of the engine, which sets the rate of requests."""
    output_len: int = 8
    """Tokens that each request generates."""
    validate_seed: int = 1
    """Random seed of prompts and arrival times."""

    def __post_init__(self) -> None:
        if not 0.0 < self.utilization < 1.0:
            raise ValueError(f"--utilization must be in (0, 1), got {self.utilization}")
        if self.requests < 1:
            raise ValueError(f"--requests must be at least 1, got {self.requests}")


def run_validate(options: ValidateOptions) -> Result:
    """Measures times to first token of the engine and of the simulated worker, and the relative
    error of the simulated mean."""
    config = EngineConfig.of(
        model=options.model,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_BUDGET,
        overlap_depth=0,
    )
    with _Engine(config) as engine:
        info = engine.info
        warm = _arrivals(options, options.validate_seed + 10**6, rate=1e9)
        busy_s = engine.replay(warm)[1]
        rate = options.utilization * options.requests / busy_s
        costs = engine.calibrated()
        arrivals = _arrivals(options, options.validate_seed, rate)
        real = engine.replay(arrivals)[0]
    shape = FleetShape(
        slowness=(1.0,),
        costs=costs,
        page_size=info.page_size,
        num_pages=info.max_total_tokens // info.page_size,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_BUDGET,
    )
    workload = Workload(name="validate", arrivals=tuple(arrivals), fleet=shape)
    [entry], _ = find_routers(("round-robin",))
    simulated = [outcome.first_token_s for outcome in simulate(workload, entry, {}, 1)]
    error = abs(mean(simulated) / mean(real) - 1.0)
    return {
        "requests": options.requests,
        "requests_per_second": rate,
        "real": _summary(real),
        "simulated": _summary(simulated),
        "sim_ttft_error": error,
        "checks": checks_json([at_most("sim_ttft_error", error, "of the real mean", _GOAL)]),
    }


class _Engine(BenchEngine):
    """Engine whose requests arrive in real time, with a step-time model fitted to its steps."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._model = StepTimeModel()

    def calibrated(self) -> StepCosts:
        """Step costs fitted to all steps so far."""
        return self._model.costs

    def replay(self, arrivals: Sequence[Arrival]) -> tuple[list[float], float]:
        """Serves requests at their arrival times. Returns their times to first token in order of
        arrival, and the total step time, in seconds."""
        first: dict[str, float] = {}
        place, busy_s = 0, 0.0
        start = time.monotonic()
        while place < len(arrivals) or self.core.has_work():
            now = time.monotonic() - start
            while place < len(arrivals) and arrivals[place].at <= now:
                self.core.add(_submit(arrivals[place]))
                place += 1
            if not self.core.has_work():
                time.sleep(max(arrivals[place].at - now, 0.0))
                continue
            report = self.step()
            done = time.monotonic() - start
            busy_s += done - now
            # Wall time between reports, which is what a step of the simulation represents.
            self._model.observe(report.load.step_shape, done - now)
            for delta in report.deltas.get(GATEWAY, ()):
                assert delta.error is None, delta.error
                if delta.token_ids:
                    first.setdefault(delta.request_id, done)
        return [first[one.request_id] - one.at for one in arrivals], busy_s


def _arrivals(options: ValidateOptions, seed: int, rate: float) -> list[Arrival]:
    """Requests with Poisson arrivals. A prompt consists of the prefix of one of a few subjects and
    a log-normal number of other tokens."""
    random = np.random.default_rng(seed)
    subjects = random.integers(10, 2000, (_SUBJECTS, _PREFIX), dtype=np.int32)
    times = np.cumsum(random.exponential(1.0 / rate, options.requests))
    arrivals = []
    for number, at in enumerate(times.tolist()):
        length = 16 + min(int(random.lognormal(4.8, 0.8)), 1500)
        own = random.integers(10, 2000, length, dtype=np.int32)
        tokens = np.concatenate([subjects[random.integers(_SUBJECTS)], own])
        arrivals.append(
            Arrival(
                request_id=f"{seed}.{number}",
                at=at,
                tokens=tokens.astype("<i4").tobytes(),
                output_len=options.output_len,
            )
        )
    return arrivals


def _submit(arrival: Arrival) -> Submit:
    return Submit(
        request_id=arrival.request_id,
        gateway_id=GATEWAY,
        prompt=arrival.tokens,
        sampling=SamplingParams(
            temperature=0.0, max_tokens=arrival.output_len, seed=1, ignore_eos=True
        ),
    )


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {
        "mean_ttft_s": mean(times),
        "p50_ttft_s": percentile(times, 50.0),
        "p99_ttft_s": percentile(times, 99.0),
    }
