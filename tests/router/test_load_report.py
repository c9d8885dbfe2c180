"""A gateway's load report: tokens at their cost, wherever they are."""

from __future__ import annotations

import msgspec
import pytest

from router.fleet import Fleet
from router.metrics.stats import ModelStats
from router.serving.load import LoadMeter, LoadReport
from tests.support.router.fleet_states import IDLE, fleet_of, prompt_of, snapshot, update

OUTPUT = 50


class Traffic:
    """A model's counters while requests arrive and end, one second at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self.now = 0.0
        self.stats = ModelStats()
        self.meter = LoadMeter(self.stats, fleet, lambda: self.now)

    def second(self, requests: int, generated: int, prompt_len: int = 100, hits: int = 0) -> None:
        self.now += 1.0
        self.stats.prompt_tokens += requests * prompt_len
        self.stats.saved_tokens += requests * hits
        self.stats.started += requests
        self.stats.prompt_length.observe(prompt_len, requests)
        self.stats.generation_tokens += generated
        self.meter.read()


@pytest.fixture
def traffic() -> Traffic:
    traffic = Traffic(fleet_of("a", "b"))
    traffic.stats.completion_tokens.observe(OUTPUT)
    return traffic


def test_work_is_what_the_tokens_that_arrive_cost(traffic: Traffic) -> None:
    for _ in range(60):
        traffic.second(4, 4 * OUTPUT)
    costs = traffic.meter._fleet.pace.costs
    places = 8
    step_s = costs.decode(places, places * (100 + OUTPUT / 2))
    expected = 4 * costs.prefill(100) + 4 * OUTPUT * step_s / places
    assert traffic.meter.read().work == pytest.approx(expected, rel=0.01)
    for _ in range(60):
        traffic.second(4, 4 * OUTPUT, hits=100)  # computed before
    decoding = 4 * OUTPUT * step_s / places
    assert traffic.meter.read().work == pytest.approx(decoding, rel=0.01)
    for _ in range(120):
        traffic.second(0, 0)
    assert traffic.meter.read().work < 1e-3


def test_demand_beyond_the_capacity_is_reported(traffic: Traffic) -> None:
    for _ in range(60):
        traffic.second(4, 4 * OUTPUT)
    carried = traffic.meter.read().work
    for _ in range(60):
        traffic.second(8, 4 * OUTPUT)
    assert traffic.meter.read().work == pytest.approx(2 * carried, rel=0.01)


def test_long_streams_count_after_they_have_arrived(traffic: Traffic) -> None:
    traffic.second(1, 100)
    for _ in range(60):
        traffic.second(0, 100)
    assert traffic.meter.read().work == pytest.approx(100 * token_s(traffic), rel=0.05)


def test_requests_that_came_and_went_are_reported_once(traffic: Traffic) -> None:
    numbers = []
    for requests in (0, 2, 0):
        traffic.second(requests, requests * OUTPUT)
        numbers.append(traffic.meter.read().num_new)  # no time has passed: unchanged
    assert numbers == [0, 2, 0]


def token_s(traffic: Traffic) -> float:
    return traffic.meter._costs()[1]


def test_caches_and_queues_of_all_workers_add_up(traffic: Traffic) -> None:
    fleet = traffic.meter._fleet
    load = msgspec.structs.replace(IDLE, num_running=8, num_free_pages=50, num_waiting=4)
    fleet.update("a", update(load))
    report = traffic.meter.read()
    assert (report.num_ready, report.num_active) == (2.0, 12.0)
    assert report.kv == pytest.approx(0.8)
    assert report.waiting_s >= 4 * OUTPUT * token_s(traffic)
    before = report.waiting_s
    queued = {"queued_prefill_tokens": 500, "num_queued_tokens": 500}
    fleet.update("a", update(msgspec.structs.replace(load, **queued)))
    report = traffic.meter.read()
    assert report.waiting_s > before
    assert report.kv == pytest.approx(0.8 + 500 / 1000)
    fleet.set_draining("a", True)
    report = traffic.meter.read()
    assert (report.num_ready, report.num_active, report.kv) == (1.0, 0.0, 0.0)


def test_the_expected_wait_is_smoothed(traffic: Traffic) -> None:
    fleet = traffic.meter._fleet
    full = msgspec.structs.replace(IDLE, num_running=8, num_waiting=40)
    for worker_id in ("a", "b"):
        fleet.update(worker_id, update(full))
    wait_s = fleet.expected_wait_s()
    assert wait_s > 0.0
    traffic.second(0, 0)
    assert 0.0 < traffic.meter.read().queue_delay_s < 0.5 * wait_s
    for _ in range(30):
        traffic.second(0, 0)
    assert traffic.meter.read().queue_delay_s == pytest.approx(wait_s, rel=0.01)
    for worker_id in ("a", "b"):
        fleet.remove(worker_id)
    for _ in range(30):
        traffic.second(0, 0)
    assert traffic.meter.read().queue_delay_s < 0.01 * wait_s


def test_nothing_is_known_of_a_model_that_never_had_a_worker() -> None:
    traffic = Traffic(Fleet(clock=lambda: 0.0))
    assert traffic.meter.read() == LoadReport()
    traffic.stats.pending_requests, traffic.stats.pending_tokens = 2, 200
    report = traffic.meter.read()
    assert report.num_pending == 2.0
    assert report.pending_s > 0.0
    assert report.pending_kv == 0.0


def test_bookings_count_as_taken() -> None:
    fleet = fleet_of("a")
    fleet.attach("a", snapshot("a"))
    traffic = Traffic(fleet)
    fleet.reserve("r", prompt_of(100))
    report = traffic.meter.read()
    assert report.num_active == 1.0
    assert report.kv == pytest.approx(0.1)
    assert report.waiting_s > 0.0


async def test_completions_of_one_prompt_compute_it_once_and_generate_each(rig) -> None:
    await rig.start()
    model = rig.gateway.model("stub")
    prompt = "a prompt that is long enough for some blocks, and not known yet"
    before = model.load._counts()
    assert (await rig.complete(prompt, n=4)).status_code == 200
    assert model.stats.hit_tokens > model.stats.prompt_tokens, (
        "three of them find the first's blocks"
    )
    prompts, completions, _ = (b - a for a, b in zip(before, model.load._counts(), strict=True))
    assert (prompts, completions) == (model.stats.prompt_tokens, 4)
