"""Decisions of the autoscaler in virtual time: bounds, delays, and no flapping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.decision import Autoscaler
from cluster.autoscaling.load import FleetLoad, combined
from router.serving.load import LoadReport
from tests.support.effort import cases

CONFIG = AutoscalingConfig(
    max_workers=8,
    target_load=0.5,
    upscale_delay_s=3.0,
    downscale_delay_s=60.0,
    downscale_to_zero_delay_s=120.0,
)
STARTS_S = 12.0


def load_of(work: float, **fields: object) -> FleetLoad:
    return FleetLoad(num_ready=1, work=work, active=work > 0.0, **fields)  # type: ignore[arg-type]


class Fleet:
    """Workers with a start-up time; work that exceeds their capacity waits."""

    def __init__(self, config: AutoscalingConfig, target: int = 1) -> None:
        self.autoscaler = Autoscaler(config)
        self.now = 0.0
        self.target = target
        self.ready = target
        self.num_running = target
        """Time of the last decision."""
        self.backlog_s = 0.0
        self.targets = [target]
        self.work = 0.0
        """Smoothed as in gateways' reports."""
        self._starting: list[float] = []

    def second(self, work: float) -> None:
        """Simulates one second of load for this number of workers."""
        self.now += 1.0
        self.backlog_s = max(self.backlog_s + work - self.ready, 0.0)
        self.work += (work - self.work) * 0.1
        arrived = [at for at in self._starting if at <= self.now]
        self._starting = [at for at in self._starting if at > self.now]
        self.ready += len(arrived)
        load = FleetLoad(
            num_ready=self.ready,
            work=self.work,
            backlog_s=self.backlog_s,
            queue_delay_s=self.backlog_s / self.ready if self.ready else 0.0,
            active=work > 0.0 or self.backlog_s > 0.0,
        )
        self.num_running = self.ready
        target = self.autoscaler.decide(load, self.target, self.now)
        if target > self.target:
            self._starting += [self.now + STARTS_S] * (target - self.target)
        elif target < self.target:
            del self._starting[max(target - self.ready, 0) :]
            self.ready = min(self.ready, target)
        if target != self.target:
            self.targets.append(target)
        self.target = target

    def run(self, works: Iterable[float]) -> None:
        for work in works:
            self.second(work)

    @property
    def num_turns(self) -> int:
        """Number of changes in the opposite direction of the previous one."""
        signs = [b > a for a, b in pairwise(self.targets)]
        return sum(a != b for a, b in pairwise(signs))


def test_load_steps_scale_up_fast_and_down_slowly() -> None:
    fleet = Fleet(CONFIG)
    fleet.run([0.3] * 60)
    assert fleet.targets == [1]
    fleet.run([1.4] * 15)
    assert fleet.target >= 2
    fleet.run([1.4] * 20)
    assert fleet.target >= 3, "three workers at half of their time"
    fleet.run([1.4] * 90)
    assert fleet.backlog_s == 0.0
    at_work = fleet.target
    fleet.run([0.2] * 55)
    assert fleet.target == at_work
    fleet.run([0.2] * 185)
    assert fleet.target == 1
    assert fleet.num_turns == 1


@pytest.mark.parametrize("seed", range(cases(20, 10)))
@pytest.mark.parametrize("mean", [0.45, 0.5, 0.8, 1.0, 1.25, 1.5])
def test_ten_minutes_of_noise_cause_at_most_one_reversal(seed: int, mean: float) -> None:
    """Noise per second and swells of a minute, also around integer numbers of workers."""
    random = np.random.default_rng(seed)
    fast = random.lognormal(0.0, 0.4, 900)
    swell = np.convolve(random.normal(0.0, 1.0, 959), np.ones(60) / 60.0, "valid") * 1.5
    fleet = Fleet(CONFIG)
    fleet.run((mean * fast * np.exp(swell))[:300])
    fleet.targets = [fleet.target]
    fleet.run((mean * fast * np.exp(swell))[300:])
    assert fleet.num_turns <= 1, fleet.targets


def test_workers_are_stopped_later_if_fewer_only_just_suffice() -> None:
    fleet = Fleet(CONFIG, target=2)
    fleet.run([0.4] * 235)
    assert fleet.target == 2
    fleet.run([0.4] * 60)
    assert fleet.target == 1


def test_bursts_shorter_than_the_delay_start_no_worker() -> None:
    fleet = Fleet(CONFIG)
    fleet.run([0.3] * 20 + [0.9, 0.9] + [0.3] * 20)
    assert fleet.targets == [1]


def test_the_delay_doubles_if_stopped_workers_are_needed_again() -> None:
    fleet = Fleet(CONFIG, target=1)
    kept = []
    for _ in range(4):
        fleet.run([1.4] * 40)
        assert fleet.target > 1
        seconds = 0
        while fleet.target > 1 and seconds < 2000:
            fleet.second(0.2)
            seconds += 1
        kept.append(seconds)
    assert kept[0] <= 140
    assert kept == sorted(kept)
    assert kept[-1] >= 4 * kept[0]
    fleet.run([0.2] * 2000)
    fleet.run([1.4] * 40 + [0.2] * kept[0])
    assert fleet.target == 1, "patience ends"


def test_an_idle_model_scales_to_zero_and_back() -> None:
    config = replace(CONFIG, min_workers=0)
    fleet = Fleet(config, target=2)
    fleet.run([0.0] * 119)
    assert fleet.target == 1
    fleet.run([0.0] * 2)
    assert fleet.target == 0
    fleet.run([0.0] * 600)
    assert fleet.target == 0
    fleet.second(0.01)
    assert fleet.target == 1, "at once, however little it is"
    waits = FleetLoad(backlog_s=100.0, active=True)
    assert Autoscaler(config).decide(waits, 0, 0.0) == 4, "100 s of work in 30 s, all of the time"


def test_the_last_worker_is_kept_with_a_minimum_of_one() -> None:
    fleet = Fleet(CONFIG)
    fleet.run([0.0] * 2000)
    assert fleet.target == 1


def test_the_decaying_mean_starts_no_worker_on_the_way_to_zero() -> None:
    """Serve scales a model from three workers to zero via one."""
    config = replace(CONFIG, max_workers=3, min_workers=0, downscale_to_zero_delay_s=3.0)
    autoscaler = Autoscaler(config)
    for tenth in range(100):
        busy = FleetLoad(num_ready=3, work=1.5, active=True)
        assert autoscaler.decide(busy, 3, tenth / 10) >= 3
    over = FleetLoad(num_ready=3, work=1.5)
    decided = [autoscaler.decide(over, 3, 10.0 + tenth / 10) for tenth in range(32)]
    assert decided[-1] == 0
    assert autoscaler.decide(over, 1, 13.2) == 0


def test_one_request_every_minute_keeps_the_last_worker() -> None:
    fleet = Fleet(replace(CONFIG, min_workers=0))
    fleet.run(([0.05] + [0.0] * 59) * 20)
    assert fleet.targets == [1]


def test_requests_between_two_observations_keep_the_last_worker() -> None:
    config = replace(CONFIG, min_workers=0)
    autoscaler = Autoscaler(config)
    for second in range(1200):
        load = FleetLoad(num_ready=1, visited=second % 60 == 0)
        assert autoscaler.decide(load, 1, float(second)) == 1
    for second in range(1200, 1400):
        target = autoscaler.decide(FleetLoad(num_ready=1), 1, float(second))
    assert target == 0
    gone = FleetLoad(visited=True)
    assert Autoscaler(config).decide(gone, 0, 0.0) == 0, "it needs no worker any more"


def needed_workers(**fields: object) -> float:
    autoscaler = Autoscaler(CONFIG)
    load = FleetLoad(num_ready=2, active=True, **fields)  # type: ignore[arg-type]
    autoscaler.decide(load, 2, 0.0)
    return autoscaler.needed_workers(load)


def test_load_backlog_delay_and_cache_each_determine_the_need() -> None:
    assert needed_workers() < 0.01
    assert needed_workers(work=1.5) == 3.0
    # A start and a horizon of 30 s each: two workers do 120 s of work in them, a new one 30 s.
    assert needed_workers(work=1.0, backlog_s=60.0) == 2.0
    assert needed_workers(work=1.0, backlog_s=90.0) == 3.0
    assert needed_workers(work=0.5, queue_delay_s=60.0) == pytest.approx(3.0)
    assert needed_workers(kv=2.55) == pytest.approx(3.0)


def test_starting_workers_count_for_waiting_requests() -> None:
    autoscaler = Autoscaler(CONFIG)
    load = FleetLoad(num_ready=1, work=0.9, backlog_s=60.0, queue_delay_s=0.9, active=True)
    targets = [autoscaler.decide(load, 3, float(second)) for second in range(30)]
    assert targets == [3] * 30
    alone = Autoscaler(CONFIG)
    assert [alone.decide(load, 1, float(second)) for second in range(4)][-1] == 3


def test_new_bounds_apply_immediately() -> None:
    assert Autoscaler(CONFIG).decide(replace(load_of(0.1), num_ready=20), 20, 0.0) == 8
    assert Autoscaler(replace(CONFIG, min_workers=2)).decide(load_of(0.1), 1, 0.0) == 2


def test_reports_add_gateway_values_and_take_the_maximum_of_worker_values() -> None:
    first = LoadReport(num_ready=2, work=0.5, pending_s=3.0, pending_kv=0.1, waiting_s=4.0, kv=1.0)
    second = LoadReport(num_ready=1, work=0.25, pending_s=1.0, waiting_s=5.0, queue_delay_s=2.0)
    load = combined([first, second])
    assert load == FleetLoad(
        num_ready=2, work=0.75, backlog_s=9.0, queue_delay_s=2.0, kv=1.1, active=False
    )
    assert combined([first, second._replace(num_pending=1.0)]).active
    visited = combined([first, second._replace(num_new=1.0)])
    assert (visited.active, visited.visited) == (False, True)


CASES = st.builds(
    AutoscalingConfig,
    max_workers=st.integers(3, 10),
    min_workers=st.integers(0, 3),
    target_load=st.floats(0.2, 1.0),
    upscale_delay_s=st.floats(0.0, 10.0),
    downscale_delay_s=st.floats(5.0, 120.0),
    downscale_to_zero_delay_s=st.floats(120.0, 300.0),
)
WORKS = st.lists(st.floats(0.0, 12.0), min_size=1, max_size=20)


@settings(max_examples=cases(150), deadline=None)
@given(CASES, WORKS, st.integers(1, 90))
def test_bounds_and_rate_of_change_hold_under_any_load(
    config: AutoscalingConfig, works: list[float], stay: int
) -> None:
    """Workers are stopped at the earliest one delay after scaling up, so that changes are rare;
    starting workers may be cancelled sooner."""
    fleet = Fleet(config, config.bounded(1))
    rose_at = -1e9
    for work in works:
        for _ in range(stay):
            before = fleet.target
            fleet.second(work)
            running = fleet.num_running
            assert config.min_workers <= fleet.target <= config.max_workers
            if fleet.target > before:
                rose_at = fleet.now
            elif fleet.target < running:
                assert fleet.now - rose_at >= config.downscale_delay_s


@settings(max_examples=cases(60, 10), deadline=None)
@given(CASES, st.floats(0.0, 12.0))
def test_a_steady_load_converges_to_enough_workers(config: AutoscalingConfig, work: float) -> None:
    # With a target load of 1, an excess of a few percent adds up to a worker's load in hours only.
    assume(work % 1.0 == 0.0 or work % 1.0 > 0.05)
    fleet = Fleet(config, config.bounded(1))
    fleet.run([work] * 3000)
    settled = fleet.target
    fleet.run([work] * 600)
    assert fleet.target == settled
    if settled < config.max_workers:
        assert fleet.backlog_s == 0.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_workers": 2, "min_workers": 3}, "--min-workers"),
        ({"min_workers": 0}, "--max-workers"),
        ({"max_workers": -1}, "--max-workers"),
        ({"max_workers": 2, "target_load": 0.0}, "target_load in --autoscaling-config"),
        ({"max_workers": 2, "target_kv_usage": 1.5}, "target_kv_usage in --autoscaling-config"),
        ({"max_workers": 2, "backlog_horizon_s": 0.0}, "backlog_horizon_s in --autoscaling-config"),
        ({"max_workers": 2, "downscale_delay_s": -1.0}, "downscale_delay_s in --autoscaling"),
    ],
)
def test_invalid_options_are_rejected_by_flag(fields: dict[str, object], named: str) -> None:
    make: Callable[..., AutoscalingConfig] = AutoscalingConfig
    with pytest.raises(ValueError, match=named):
        make(**fields)
