"""Measured start-up times, stuck starts, and the service rate of workers."""

from __future__ import annotations

import pytest

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.planning import ServiceRate
from cluster.autoscaling.starts import StartTimes


def measured(*took_s: float) -> tuple[StartTimes, float]:
    """One worker runs; starts with these durations were observed, and their workers stopped."""
    starts, now = StartTimes(), 0.0
    for took in took_s:
        starts.observe(1, 1, now)
        starts.observe(2, 1, now)
        starts.observe(2, 2, now + took)
        starts.observe(1, 1, now + took)
        now += took + 1.0
    return starts, now


def test_a_start_is_measured_from_the_order_until_the_worker_runs() -> None:
    starts, _ = measured()
    assert starts.usual_s == 30.0, "the prior"
    assert measured(200.0)[0].usual_s == 200.0
    assert measured(200.0, 7200.0)[0].usual_s == 200.0, "a single outlier does not count"
    assert measured(*[30.0] * 8, *[90.0] * 5)[0].usual_s == 90.0, "but a new habit does"


def test_starts_before_the_first_observation_are_not_measured() -> None:
    """Serve's controller has restarted, and discovers its replicas one by one."""
    starts = StartTimes()
    starts.observe(50, 0, 0.0)
    starts.observe(50, 50, 2.0)
    assert starts.usual_s == 30.0


def test_before_the_first_measurement_the_age_of_the_oldest_start_counts() -> None:
    starts = StartTimes()
    starts.observe(1, 1, 0.0)
    starts.observe(9, 1, 0.0)
    starts.observe(9, 1, 250.0)
    assert starts.usual_s == 250.0
    assert starts.remaining_s() == [0.0] * 8
    starts.observe(1, 1, 260.0)  # called off
    assert starts.usual_s == 250.0, "that it takes as long is known all the same"
    assert (starts.remaining_s(), starts.num_lost) == ([], 0)


def test_a_stuck_start_is_replaced_and_blocks_nothing() -> None:
    starts, now = measured(30.0)
    starts.observe(10, 1, now)
    starts.observe(10, 9, now + 30.0)
    assert (len(starts.remaining_s()), starts.num_lost) == (1, 0)
    starts.observe(10, 9, now + 91.0)
    assert (starts.num_lost, starts.remaining_s()) == (1, [])
    starts.observe(10, 9, now + 36_000.0)
    assert starts.usual_s == 30.0
    starts.observe(10, 10, now + 36_001.0)
    assert starts.num_lost == 0, "it came after all"


def test_one_more_is_started_if_no_start_completes() -> None:
    starts, now = measured(*[30.0] * 8)
    starts.observe(1, 1, now)
    starts.observe(5, 1, now)
    starts.observe(5, 1, now + 120.0)
    assert starts.num_lost == 1
    alone = StartTimes()
    alone.observe(1, 1, 0.0)
    alone.observe(2, 1, 0.0)
    alone.observe(2, 1, 599.0)
    assert alone.num_lost == 0
    alone.observe(2, 1, 601.0)
    assert alone.num_lost == 1


def rate_after(seconds: int, arriving: float, growth: float, wait_s: float) -> float:
    """Load of ten workers with this metered work and growth of the backlog."""
    rate = ServiceRate(AutoscalingConfig(max_workers=20), 2400.0)
    for second in range(seconds):
        load = FleetLoad(
            num_ready=10,
            work=arriving,
            backlog_s=100.0 + growth * second,
            queue_delay_s=wait_s,
            active=True,
        )
        rate.observe(load, float(second))
    return rate.value


def test_the_service_rate_is_measured_while_requests_queue() -> None:
    assert rate_after(600, 12.0, 2.0, 10.0) == pytest.approx(1.0, abs=0.01)
    assert rate_after(600, 7.0, 1.0, 10.0) == pytest.approx(0.6, abs=0.02)
    assert rate_after(600, 6.0, 0.0, 10.0) == pytest.approx(0.6, abs=0.02)
    assert rate_after(600, 6.0, 0.0, 0.5) == 1.0, "without a queue nothing is known"
    assert rate_after(600, 1.0, 0.0, 10.0) == pytest.approx(0.5, abs=0.01), "twice at most"
