"""Thousands of workers: the cost of a change must not grow with their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Self

import numpy as np
import pytest

from router.config import RoutingConfig
from router.fleet import Fleet, PromptBlocks
from router.fleet.pace import FleetPace
from router.fleet.pricing import price_all, price_load
from router.fleet.workers import WorkerTable
from worker.protocol.blocks import block_hash_array, root_hash
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockStored,
    EngineInfo,
    LoadSnapshot,
    StepShape,
    WorkerUpdate,
)
from worker.protocol.step_time import StepCosts

PAGE = 16
SALT = "scale"
INFO = EngineInfo("m", 10**6, 10**7, 1000, PAGE, 64, [0], SALT, max_num_batched_tokens=2048)
COSTS = StepCosts(
    constant=0.01, prefill_token=1e-4, attended=2e-9, decode_row=1e-4, context_token=5e-9
)


def attach(fleet: Fleet, number: int, blocks: list[BlockStored], epoch: int = 1) -> None:
    load = LoadSnapshot(num_free_pages=500, num_total_pages=500, max_num_seqs=64)
    name = f"w{number}"
    fleet.attach(name, AttachSnapshot(PROTOCOL_VERSION, name, epoch, INFO, blocks, load))


def large_fleet(count: int, clock: Callable[[], float] = lambda: 1.0) -> Fleet:
    fleet = Fleet(RoutingConfig(), clock=clock)
    for number in range(count):
        attach(fleet, number, [])
    return fleet


def prompt(seed: int, blocks: int = 20) -> bytes:
    random = np.random.default_rng(seed)
    return random.integers(0, 1000, blocks * PAGE + 3, dtype="<i4").tobytes()


def test_the_one_worker_of_thousands_that_has_the_prompt_is_found_until_it_is_lost() -> None:
    fleet = large_fleet(3000)
    tokens = prompt(1)
    hashes = block_hash_array(tokens, PAGE, root_hash(SALT)).tolist()
    attach(fleet, 2345, [BlockStored(hashes, None)], epoch=2)
    choice = fleet.reserve("a", PromptBlocks(tokens))
    assert choice is not None
    assert (choice.worker_id, choice.hit_tokens) == ("w2345", 20 * PAGE)
    fleet.release_booking("w2345", "a")
    fleet.lose("w2345")
    choice = fleet.reserve("b", PromptBlocks(tokens))
    assert choice is not None
    assert choice.worker_id != "w2345"
    assert choice.hit_tokens == 0
    # Its index slot is reused eventually: it must not cause false hits.
    attach(fleet, 2345, [], epoch=3)
    assert fleet.view(PromptBlocks(tokens), ()).best_hit <= 20 * PAGE
    assert fleet.view(PromptBlocks(prompt(2)), ()).best_hit == 0


def test_eligible_is_who_is_ready_whatever_came_before() -> None:
    fleet = large_fleet(40)
    fleet.lose("w3")
    fleet.set_draining("w4", True)
    fleet.set_draining("w4", True)
    fleet.remove("w5")
    attach(fleet, 3, [], epoch=2)
    attach(fleet, 3, [], epoch=3)
    ready = {worker.worker_id for worker in fleet.workers if worker.ready}
    eligible = {fleet.table.ids[row] for row in np.flatnonzero(fleet.table.eligible)}
    assert eligible == ready == {f"w{n}" for n in range(40)} - {"w4", "w5"}
    for worker_id in sorted(ready):
        fleet.lose(worker_id)
    assert not fleet.ready
    assert fleet.block_keys() == []
    assert fleet.reserve("a", PromptBlocks(prompt(1))) is None


def test_all_at_once_are_priced_as_one_by_one() -> None:
    random = np.random.default_rng(0)
    table = WorkerTable()
    rows = [table.add(f"w{number}") for number in range(30)]
    factors = np.ones(table.capacity)
    for row in rows:
        factors[row] = random.uniform(0.5, 2.0)
        queued = int(random.integers(0, 4)) * 1000
        load = LoadSnapshot(
            num_running=int(random.integers(0, 3)),
            num_waiting=2 if queued else 0,
            num_queued_tokens=queued // 2,
            queued_prefill_tokens=queued,
            queued_cached_tokens=100 if queued else 0,
            num_reserved=1,
            reserved_prefill_tokens=int(random.integers(0, 2)) * 700,
            new_prompt_share=0.25,
            step_shape=StepShape(seq=1, decode_rows=2, decode_context=900),
        )
        table.reported_at[row] = random.uniform(0.0, 9.0)
        table.reserved_s[row] = random.uniform(0.0, 1.0)
        price_load(table, row, load, INFO, COSTS, factors.item(row))
    names = (
        "queue_s",
        "first_chunks_s",
        "drain_s",
        "step_s",
        "prefill_token_s",
        "attended_s",
    )
    names += ("queue_until", "first_chunks_until", "left_s")
    before = {name: getattr(table, name)[rows].copy() for name in names}
    assert all(values.any() for values in before.values())
    price_all(table, COSTS, factors)
    for name in names:
        assert getattr(table, name)[rows] == pytest.approx(before[name]), name


def test_a_queue_costs_its_tokens_and_its_steps() -> None:
    table = WorkerTable()
    row = table.add("w")
    load = LoadSnapshot(num_waiting=1, num_queued_tokens=5000, queued_prefill_tokens=5000)
    price_load(table, row, load, INFO, COSTS, 2.0)
    expected = 2.0 * (COSTS.prefill(5000) + 3 * COSTS.constant)
    assert table.queue_s.item(row) == pytest.approx(expected)
    assert table.drain_s.item(row) == pytest.approx(2.0 * (COSTS.prefill(2048) + COSTS.constant))


def test_speeds_are_learned_per_worker_and_new_ones_get_what_is_usual() -> None:
    seq = 0
    fleet = large_fleet(200, lambda: float(seq))
    for seq in range(1, 40):
        for number in range(100):
            slowness = 3.0 if number < 20 else 1.0
            shape = StepShape(seq=seq, prefill_tokens=500 + 7 * ((seq * 13 + number) % 100))
            seconds = slowness * COSTS.step(shape)
            load = LoadSnapshot(step_ms=1000.0 * seconds, step_shape=shape, max_num_seqs=64)
            fleet.update(f"w{number}", WorkerUpdate(1, seq, [], [], load))
    pace, worker = fleet.pace, fleet.worker
    slow, fast, new = (pace.factor(worker(f"w{n}").row) for n in (5, 50, 150))
    assert slow / fast == pytest.approx(3.0, rel=0.2)
    assert fast <= new < slow
    assert (
        fleet.table.relative_speed[worker("w50").row] > fleet.table.relative_speed[worker("w5").row]
    )


def test_steps_that_should_take_no_time_say_nothing_of_a_workers_speed() -> None:
    pace = FleetPace()
    seq = 0
    for seq in range(1, 400):
        size = 300 + seq * 37 % 1700
        shape = StepShape(seq, size, size * size // 2, seq % 5, 500 * (seq % 5))
        seconds = max(1e-4 * (size - 600), 1e-6)
        pace.observe(0, LoadSnapshot(step_ms=1000.0 * seconds, step_shape=shape), float(seq))
    decodes = StepShape(seq + 4, 0, 0, 4, 2000)
    assert pace.costs.step(decodes) == 0.0
    before = pace._logs.item(0)
    pace.observe(0, LoadSnapshot(step_ms=5.0, step_shape=decodes), float(seq + 1))
    assert pace._logs.item(0) == before


class Calls:
    """Counts function calls, including compiled functions, while entered."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.number += event in ("call", "c_call")


def calls_of_decisions(num_workers: int) -> tuple[int, int]:
    """Of 20 decisions, and of 20 workers that fail and reattach."""
    fleet = large_fleet(num_workers)
    with Calls() as decided:
        for number in range(20):
            text = PromptBlocks(prompt(number, blocks=100), memo=fleet.memo)
            assert fleet.reserve(f"r{number}", text) is not None
    with Calls() as replaced:
        for number in range(20):
            fleet.lose(f"w{number}")
            attach(fleet, number, [], epoch=2)
    return decided.number, replaced.number


def test_among_two_thousand_workers_python_does_no_more_than_among_a_hundred() -> None:
    """The rest is numpy's, some 10 ns per worker."""
    small, large = calls_of_decisions(100), calls_of_decisions(2000)
    assert large[0] <= 1.1 * small[0]
    assert large[1] <= 1.1 * small[1]


def test_waits_for_a_slot_follow_bookings_reports_and_prices() -> None:
    """They are added one by one, with the same result as all at once."""
    fleet = large_fleet(8)

    def check() -> None:
        table = fleet.table
        expected = table.slot_waits_s(table.num_active)
        assert table.slot_wait_s == pytest.approx(expected), "not those of the active requests"

    for number in range(40):
        assert fleet.reserve(f"r{number}", PromptBlocks(prompt(number))) is not None
        check()
    for seq in range(1, 30):
        shape = StepShape(seq, 700 + 13 * seq, (700 + 13 * seq) ** 2 // 2, seq % 7, 300 * seq)
        load = LoadSnapshot(
            num_running=seq, max_num_seqs=4, step_ms=1000.0 * COSTS.step(shape), step_shape=shape
        )
        fleet.update(f"w{seq % 3}", WorkerUpdate(1, seq, [], [], load))
        check()
    assert fleet.table.slot_wait_s.max() > 0.0
    for number in range(40):
        for worker in fleet.workers:
            fleet.release_booking(worker.worker_id, f"r{number}")
        check()
