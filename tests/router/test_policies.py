"""Policies on fleets with scripted reports; no event loop, no clock."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import numpy as np
import pytest

from router.config import PolicyName
from router.fleet import PromptBlocks
from tests.support.router.played_fleet import PAGE, PlayedFleet
from worker.protocol.messages import (
    StepShape,
)

POLICIES = get_args(PolicyName)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 10**5, count).astype("<i4")


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_workers_are_chosen_without_bias(policy: str) -> None:
    bench = PlayedFleet(policy)
    counts = Counter(bench.choose(tokens(64, n), session=f"s{n}") for n in range(800))
    assert len(counts) == 4
    assert min(counts.values()) > 150, counts


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_to_the_eligible_workers(policy: str) -> None:
    bench = PlayedFleet(policy, num_workers=3)
    bench.fleet.set_draining("w1", True)
    chosen = {bench.choose(tokens(64, n), session=f"s{n}") for n in range(40)}
    assert chosen == {"w0", "w2"}
    prompt = PromptBlocks(tokens(64).tobytes(), session="s")
    choice = bench.fleet.reserve("r", prompt, ["w0"])
    assert choice is not None
    assert choice.worker_id == "w2"
    assert bench.fleet.reserve("r2", prompt, ["w0", "w2"]) is None


@pytest.mark.parametrize("policy", ["adaptive", "prefix-score"])
def test_a_cached_prefix_attracts(policy: str) -> None:
    bench = PlayedFleet(policy)
    prompt = tokens(4000)
    bench.cache("w2", prompt[:3200])
    assert bench.choose(prompt) == "w2"


@pytest.mark.parametrize("policy", ["adaptive", "least-load", "power-of-two"])
def test_load_repels(policy: str) -> None:
    bench = PlayedFleet(policy, num_workers=2)
    bench.load("w0", num_waiting=5, queued_prefill_tokens=30_000)
    assert {bench.choose(tokens(1000, n)) for n in range(20)} == {"w1"}


def test_adaptive_leaves_the_holder_for_queues_that_cost_more_than_the_prefix() -> None:
    bench = PlayedFleet("adaptive", num_workers=2)
    prompt = tokens(2000)
    bench.cache("w0", prompt)
    bench.load("w0", num_waiting=1, queued_prefill_tokens=1000)
    assert bench.choose(prompt) == "w0"
    queue = {"num_waiting": 20, "queued_prefill_tokens": 20_000, "num_queued_tokens": 20_000}
    bench.load("w0", **queue)
    assert bench.choose(prompt) == "w1"
    bench.load("w0", **queue, queued_cached_tokens=19_500)
    assert bench.choose(prompt) == "w0"


@pytest.mark.parametrize(
    ("share", "tail", "chosen"),
    [
        (0.5, 200, "w0"),  # a single chunk, which running prefills let pass
        (0.5, 2000, "w1"),
        (0.0, 200, "w1"),
    ],
)
def test_a_short_prompt_does_not_wait_for_long_ones_under_way(
    share: float, tail: int, chosen: str
) -> None:
    bench = PlayedFleet("adaptive", num_workers=2)
    prompt = tokens(2000)
    bench.cache("w0", prompt)
    bench.load("w0", num_running=1, queued_prefill_tokens=40_000, new_prompt_share=share)
    assert bench.choose(np.concatenate([prompt, tokens(tail, 1)])) == chosen


def test_what_is_on_its_way_to_the_cache_is_waited_for() -> None:
    bench = PlayedFleet("adaptive", num_workers=2)
    prompt = tokens(4000)
    bench.load("w0", num_running=1, queued_prefill_tokens=40_000, new_prompt_share=0.5)
    bench.fleet.reserve("oldest", PromptBlocks(prompt.tobytes()), ["w1"])
    younger = np.concatenate([prompt, tokens(200, 1)])
    assert bench.choose(younger) == "w1"
    bench.cache("w0", prompt)
    assert bench.choose(younger) == "w0"


def test_adaptive_keeps_to_the_holder_longer_the_busier_the_fleet() -> None:
    def length_of_queue_that_moves(busy_part: float) -> int:
        bench = PlayedFleet("adaptive", num_workers=2)
        prompt = tokens(2000)
        bench.cache("w0", prompt)
        for second in range(300):
            bench.now = float(second)
            for row in range(2):
                bench.fleet.utilisation.add(row, busy_part, bench.now)
        for queued in range(0, 400_000, 500):
            bench.load("w0", num_waiting=10, queued_prefill_tokens=queued)
            if bench.choose(prompt) == "w1":
                return queued
        raise AssertionError("never moved")

    idle, half, full = (length_of_queue_that_moves(part) for part in (0.0, 0.7, 1.0))
    assert idle < half < full
    assert full > 4 * idle


def test_adaptive_places_new_prefixes_where_the_load_is_lowest() -> None:
    bench = PlayedFleet("adaptive", num_workers=4)
    for second in range(30):
        bench.now = float(second)
        for row, part in enumerate([0.3, 0.5, 0.1, 0.2]):
            bench.fleet.utilisation.add(row, part, bench.now)
    chosen = {bench.choose(tokens(1000, number)) for number in range(8)}
    assert chosen == {"w2"}
    bench.load("w2", num_waiting=1, queued_prefill_tokens=1000)
    assert bench.choose(tokens(1000, 9)) == "w3", "rather than wait for it"


def test_adaptive_prefers_the_device_to_the_host_and_the_host_to_nothing() -> None:
    bench = PlayedFleet("adaptive", num_workers=3)
    prompt = tokens(3000)
    bench.cache("w1", prompt, "host")
    assert bench.choose(prompt) == "w1"
    bench.cache("w2", prompt)
    assert bench.choose(prompt) == "w2"
    view = bench.fleet.view(PromptBlocks(prompt.tobytes()))
    assert view.host_hit_tokens is not None
    assert view.host_hit_tokens[:3].tolist() == [0.0, 2992.0, 0.0]
    assert view.hit_tokens[:3].tolist() == [0.0, 2992.0, 2992.0]


def test_adaptive_avoids_full_batches() -> None:
    bench = PlayedFleet("adaptive", num_workers=2)
    bench.load("w0", num_running=32)
    bench.load("w1", num_running=20)
    assert {bench.choose(tokens(100, n)) for n in range(10)} == {"w1"}


def test_speeds_are_learned_and_used() -> None:
    bench = PlayedFleet("adaptive", num_workers=3)
    random = np.random.default_rng(0)
    factors = {"w0": 1.0, "w1": 1.03, "w2": 4.0}
    for seq in range(1, 400):
        bench.now += 0.1
        for name, factor in factors.items():
            count = int(random.integers(0, 2) * random.integers(1, 2048))
            shape = StepShape(seq, count, count * count // 2, 8, 8 * 500)
            seconds = factor * (0.003 + 5e-5 * count + 1e-9 * count * count + 8 * 2e-5)
            noisy = seconds * float(random.normal(1.0, 0.05)) * 1000.0
            bench.load(name, step_shape=shape, step_ms=noisy, num_running=0)
    table = bench.fleet.table
    per_token = table.prefill_token_s[:3] / table.prefill_token_s[0]
    assert per_token[1] == 1.0  # too few observations
    assert per_token[2] == pytest.approx(4.0, rel=0.2)
    assert table.relative_speed[:3].mean() == pytest.approx(1.0)
    assert table.relative_speed[0] / table.relative_speed[2] == pytest.approx(
        per_token[2], rel=1e-6
    )
    counts = Counter(bench.choose(tokens(1000, n), keep=True) for n in range(90))
    assert counts["w2"] < counts["w0"] / 2.5
    assert abs(counts["w0"] - counts["w1"]) <= 5


def test_a_worker_that_looked_slow_gets_another_chance() -> None:
    bench = PlayedFleet("adaptive", num_workers=2)

    def steps(name: str, factor: float, start: int) -> None:
        for seq in range(start, start + 100):
            bench.now += 0.1
            seconds = factor * (0.003 + 5e-5 * 500)
            bench.load(name, step_shape=StepShape(seq, 500, 125_000, 0, 0), step_ms=1000 * seconds)

    steps("w0", 1.0, 1)
    steps("w1", 3.0, 1)  # disturbed by something else
    steps("w0", 1.0, 101)
    assert {bench.choose(tokens(1000, n)) for n in range(10)} == {"w0"}
    for turn in range(10):
        steps("w0", 1.0, 201 + 100 * turn)
    bench.load("w0")
    assert {bench.choose(tokens(1000, n)) for n in range(20)} == {"w1"}, "w0 was the busy one"


def test_running_requests_repel_a_little() -> None:
    bench = PlayedFleet("adaptive", num_workers=2)
    bench.load("w0", num_running=8)
    bench.load("w1", num_running=7)
    assert {bench.choose(tokens(100, n)) for n in range(10)} == {"w1"}
    prompt = tokens(1000)
    bench.cache("w0", prompt)
    assert bench.choose(prompt) == "w0"


def test_prefix_score_follows_the_formula_and_its_weights() -> None:
    for weights in ((10.0, 100.0, 0.1, 0.5), (3.0, 20.0, 1.0, 2.0)):
        hit, utilisation, free, room = weights
        bench = PlayedFleet(
            "prefix-score",
            num_workers=1,
            explain_routing=True,
            prefix_score_hit_weight=hit,
            prefix_score_utilisation_weight=utilisation,
            prefix_score_kv_free_weight=free,
            prefix_score_batch_room_weight=room,
        )
        bench.cache("w0", tokens(160))
        bench.load("w0", num_running=2, num_waiting=1, num_free_pages=50, num_total_pages=100)
        choice = bench.fleet.reserve("a", PromptBlocks(tokens(320, 9).tobytes()))
        assert choice is not None
        choice = bench.fleet.reserve("b", PromptBlocks(tokens(480).tobytes()))
        assert choice is not None
        assert choice.explanation is not None
        expected = 160 * hit - utilisation * 4 / 32 + free * (50 - 320 / PAGE) + room * 28
        assert -sum(choice.explanation.terms.values()) == pytest.approx(expected)


def test_round_robin_goes_round_and_sessions_stay() -> None:
    bench = PlayedFleet("round-robin", num_workers=3)
    assert [bench.choose(tokens(64)) for _ in range(6)] == ["w0", "w1", "w2"] * 2
    bench = PlayedFleet("session", num_workers=4)
    homes = {f"s{n}": bench.choose(tokens(64, n), session=f"s{n}") for n in range(60)}
    bench.fleet.remove("w1")
    for name, home in homes.items():
        now = bench.choose(tokens(64, 99), session=name)
        assert now == home if home != "w1" else now != "w1"
    assert len({bench.choose(tokens(64)) for _ in range(3)}) == 3  # without a session: round robin


def test_power_of_two_is_blind_to_all_but_two() -> None:
    bench = PlayedFleet("power-of-two", num_workers=8)
    bench.load("w7")
    for name in bench.names[:7]:
        bench.load(name, num_waiting=1, queued_prefill_tokens=5000)
    chosen = Counter(bench.choose(tokens(64, n)) for n in range(400))
    assert 60 < chosen["w7"] < 140  # it is in one of four pairs
