"""The gate in fully known simulations: losses and missed gains."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from worker.config import SchedulingConfig, SpeculativeConfig
from worker.core.cache.lease import Lease
from worker.core.request import Request
from worker.core.scheduler.speculation_gate import SpeculationGate
from worker.core.scheduler.step import InFlightRow, StepInFlight
from worker.core.scheduler.token_steps import TokenSteps
from worker.core.step_forecast import StepForecast
from worker.plan.plan import DraftRow, PlannedRow, Row, StepResult
from worker.protocol.messages import StepShape, Submit
from worker.protocol.sampling import SamplingParams

MAX_DRAFTS = 8
LEASE = Lease(slot=0, pages=[], node=None, num_cached_pages=0)


@dataclass
class World:
    """Steps of `running` requests at once, each of `length` tokens."""

    likelihood: Callable[[random.Random, float], float]
    """Probability that one draft token is right, by its own probability and the simulated time in
    ms."""
    running: int = 1
    length: int = 20
    base_ms: float = 0.4
    row_ms: float = 0.02
    look_ms: float = 0.15
    draft_ms: float = 0.06
    start_ms: float = 0.1
    """Cost of the first look-up of a request."""
    is_calibrated: bool = True
    """Whether the proposer knows the probability of each draft and stops at the threshold."""
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    now_ms: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    forecast: StepForecast = field(default_factory=lambda: StepForecast(1024))
    ids: itertools.count[int] = field(default_factory=itertools.count)
    requests: list[Request] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    def run(self, gate: SpeculationGate | None, num_tokens: int) -> float:
        """Tokens per ms over this many more tokens."""
        tokens, elapsed = self.num_tokens, self.now_ms
        while self.num_tokens < tokens + num_tokens:
            self.step(gate)
        return (self.num_tokens - tokens) / (self.now_ms - elapsed)

    def step(self, gate: SpeculationGate | None) -> None:
        """One step of all running requests."""
        while len(self.requests) < self.running:
            request = make_request(str(next(self.ids)))
            self.left[request.request_id] = self.length
            self.requests.append(request)
        costs = self.forecast.costs if self.forecast.is_ready else None
        threshold = 0.0 if gate is None else gate.begin_step(self.running, self.running, 0.0, costs)
        is_open = gate is not None and gate.is_open
        allowed = [gate.num_drafts(request) if is_open else 0 for request in self.requests]
        drafted, drawn, draft_ms = [], [], 0.0
        for request, limit in zip(self.requests, allowed, strict=True):
            num_drafts, num_right = self.draft(
                min(limit, self.left[request.request_id] - 1), threshold
            )
            drafted.append(num_drafts)
            drawn.append(num_right + 1)
            if limit:
                is_first = request.speculation is None or not request.speculation.has_drafted
                draft_ms += self.look_ms + is_first * self.start_ms
        step_ms = self.base_ms + self.row_ms * self.running + self.draft_ms * sum(drafted)
        step_ms = (step_ms + draft_ms) * self.rng.lognormvariate(0.0, 0.1)
        self.now_ms += step_ms
        self.num_tokens += sum(drawn)
        self.num_steps += 1
        self.num_drafts += sum(drafted)
        if gate is not None:
            rows = [
                InFlightRow(row(limit), request, LEASE)
                for request, limit in zip(self.requests, allowed, strict=True)
            ]
            drafting = [place for place, limit in enumerate(allowed) if limit]
            result = StepResult(
                seq=self.num_steps,
                token_ids=[5] * sum(drawn),
                compute_ms=step_ms,
                drafted=[drafted[place] for place in drafting] or None,
                num_sampled=[drawn[place] for place in drafting] or None,
            )
            self.report(gate, in_flight(self.num_steps, rows), result)
        for request, count in zip(self.requests, drawn, strict=True):
            self.left[request.request_id] -= count
        self.requests = [one for one in self.requests if self.left[one.request_id] > 0]

    def report(self, gate: SpeculationGate, step: StepInFlight, result: StepResult) -> None:
        """Reports a result as the scheduler does."""
        shape, elapsed_ms = step.measured(result)
        self.forecast.observe(shape, elapsed_ms / 1e3)
        gate.observe(step, result, TokenSteps.counts(step, result), shape)

    def draft(self, max_drafts: int, threshold: float) -> tuple[int, int]:
        """Drafts of one row, and how many of them are right."""
        reach, num_right, all_right = 1.0, 0, True
        for number in range(max_drafts):
            share = self.likelihood(self.rng, self.now_ms)
            reach *= share
            if self.is_calibrated and reach < threshold:
                return number, num_right
            all_right &= self.rng.random() < share
            num_right += all_right
        return max_drafts, num_right


def row(num_drafts: int) -> Row:
    return DraftRow(0, 0, 1, num_drafts) if num_drafts else PlannedRow(0, 0, 1, 1)


def in_flight(seq: int, rows: list[InFlightRow]) -> StepInFlight:
    # Speculative rows come after the others.
    rows = sorted(rows, key=lambda one: isinstance(one.row, DraftRow))
    shape = StepShape(seq, decode_rows=len(rows))
    return StepInFlight(seq=seq, rows=rows, num_tokens=len(rows), shape=shape, has_chunks=False)


def make_request(request_id: str) -> Request:
    submit = Submit(
        request_id=request_id,
        gateway_id="g",
        prompt=bytes(16),
        sampling=SamplingParams(temperature=0.0, max_tokens=50, seed=0),
    )
    return Request(submit, arrival=1, arrived_s=0.0, max_total_tokens=99, eos_token_ids=())


def make_gate(
    *, max_drafts: int = MAX_DRAFTS, adaptive: bool = True, stops: bool = True
) -> SpeculationGate:
    config = SpeculativeConfig(num_speculative_tokens=max_drafts, adaptive=adaptive)
    return SpeculationGate(config, SchedulingConfig(max_num_seqs=999), stops_itself=stops)


def often(rng: random.Random, now_ms: float) -> float:
    """Almost all drafts are nearly certain."""
    return 0.98 if rng.random() < 0.85 else 0.5


def never(rng: random.Random, now_ms: float) -> float:
    return 0.01


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_profitable_drafts_match_the_best_fixed_number(is_calibrated: bool) -> None:
    def world() -> World:
        return World(often, is_calibrated=is_calibrated)

    fixed = [
        world().run(make_gate(max_drafts=limit, adaptive=False), 6000)
        for limit in (2, 4, MAX_DRAFTS)
    ]
    plain = world().run(None, 6000)
    gate, own = make_gate(stops=is_calibrated), world()
    own.run(gate, 500)
    rate = own.run(gate, 6000)
    assert max(fixed) > 1.5 * plain, "drafts pay off in this simulation"
    # Requests do not differ here, so per-request statistics of a proposer without probabilities are
    # noise.
    assert rate > (0.97 if is_calibrated else 0.93) * max(fixed)


@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize("running", [1, pytest.param(4, marks=pytest.mark.long), 32])
def test_wrong_drafts_cost_almost_nothing(running: int, is_calibrated: bool) -> None:
    def world() -> World:
        return World(never, running=running, length=96, is_calibrated=is_calibrated)

    num_tokens = max(6000, 1000 * running)
    plain = world().run(None, num_tokens)
    gate, own = make_gate(stops=is_calibrated), world()
    own.run(gate, 200 * running)
    assert own.run(gate, num_tokens) > 0.98 * plain


def test_expensive_drafts_cost_almost_nothing() -> None:
    def world() -> World:
        return World(
            often, running=32, length=30, row_ms=0.06, draft_ms=0.065, look_ms=0.02, start_ms=0.02
        )

    plain = world().run(None, 30000)
    gate, own = make_gate(), world()
    own.run(gate, 3000)
    assert own.run(gate, 30000) > 0.98 * plain


def test_drafting_stops_and_resumes_with_acceptance() -> None:
    def drifts(rng: random.Random, now_ms: float) -> float:
        return 0.01 if 1000.0 < now_ms < 3000.0 else 0.95

    gate, world = make_gate(), World(drifts, is_calibrated=False)

    def drafts_per_step(until_ms: float) -> float:
        drafts, steps = world.num_drafts, world.num_steps
        while world.now_ms < until_ms:
            world.step(gate)
        return (world.num_drafts - drafts) / (world.num_steps - steps)

    drafts_per_step(500.0)
    assert drafts_per_step(1000.0) > 5.0
    drafts_per_step(1300.0)
    assert drafts_per_step(3000.0) < 0.3
    drafts_per_step(3600.0)
    assert drafts_per_step(4000.0) > 5.0


def test_losses_of_large_batches_do_not_affect_small_ones() -> None:
    gate = make_gate()
    costly = World(often, running=32, row_ms=0.1, draft_ms=0.1, look_ms=0.1)
    costly.run(gate, 20000)
    assert costly.num_drafts < 0.1 * costly.num_tokens
    small = World(often, forecast=costly.forecast, num_steps=costly.num_steps)
    assert small.run(gate, 1000) > 1.4 * World(often).run(None, 1000)


def test_a_row_after_the_end_of_its_request_has_no_effect_on_costs() -> None:
    gates, worlds = [make_gate(), make_gate()], [World(often), World(often)]
    for gate, world in zip(gates, worlds, strict=True):
        world.run(gate, 300)
    request = make_request("ended")
    for _ in range(50):
        one = InFlightRow(row(MAX_DRAFTS), request, LEASE)
        worlds[0].num_steps += 1
        seq = worlds[0].num_steps
        result = StepResult(seq=seq, token_ids=[], compute_ms=0.02, drafted=[0], num_sampled=[0])
        worlds[0].report(gates[0], in_flight(seq, [one]), result)
    thresholds = [
        gate.begin_step(1, 1, 0.0, world.forecast.costs)
        for gate, world in zip(gates, worlds, strict=True)
    ]
    assert thresholds[0] == thresholds[1]
    assert gates[0].totals.num_decode_rows == gates[1].totals.num_decode_rows


def test_decisions_depend_on_the_calls_only() -> None:
    worlds = [World(often), World(often)]
    rates = [world.run(make_gate(), 3000) for world in worlds]
    assert rates[0] == rates[1]
    assert math.isfinite(rates[0])
