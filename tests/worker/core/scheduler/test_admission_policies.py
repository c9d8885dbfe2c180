"""Requests admitted by a round, against the definition and against brute force."""

from __future__ import annotations

import random
from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import cases
from tests.support.worker.fake_device import Harness, make_submit
from worker.core.scheduler.budget import StepBudget
from worker.core.scheduler.policy import (
    ORDERS,
    POLICIES,
    AdmissionPolicy,
    AdmissionRound,
    Item,
    Outcome,
    StepHeadroom,
)
from worker.core.scheduler.starvation_guard import MAX_PASSES
from worker.protocol.admission import AdmissionChange, AdmissionPolicyName, SchedulePolicy

LEVEL = 4
FIFO, PACK = POLICIES["fifo"], POLICIES["pack"]


def admit(
    policy: AdmissionPolicy, costs: list[int], max_tokens: int, max_requests: int = 1000
) -> list[int]:
    """A round in which slots and pages never run out, and prompts are not chunked."""
    headroom = StepBudget(10_000, 0, max_prefill_tokens=max_tokens, chunked=False).headroom(
        [], max_requests
    )
    return list(play(policy, [Item(cost, LEVEL, cost) for cost in costs], headroom))


def play(policy: AdmissionPolicy, items: list[Item], headroom: StepHeadroom) -> dict[int, int]:
    """Tokens granted, if every tried request finds a slot and pages."""
    round_ = AdmissionRound(policy, items, headroom)
    while round_.next() is not None:
        round_.report(Outcome.ENTERED)
    return round_.lengths


def test_the_most_urgent_prompts_get_all_tokens_they_can_use() -> None:
    budget = StepBudget(100, 0, share=0.5)
    # Running: 30 of level 6, 60 of level 7; new: 200 of level 7, 50 of level 6.
    headroom = budget.headroom([60], 9, above=0)
    assert headroom.tokens == 50
    lengths = budget.allot([30, 60], [49, 1], [200, 50], [6, 7, 7, 6])
    assert lengths == [0, 50, 49, 1]
    # More urgent running ones leave the rest to new ones.
    assert StepBudget(100, 0, share=0.5).headroom([], 9, above=70).tokens == 30
    assert not StepBudget(100, 0, share=0.5).headroom([], 9, above=170).is_open
    # Shares are between equals: alone at the top, a prompt takes all; below, halves.
    assert StepBudget(100, 0, share=0.5).allot([90, 80], [40], [300], [4, 4, 7]) == [0, 0, 100]
    assert StepBudget(100, 0, share=0.5).allot([90, 80], [20], [20], [4, 4, 7]) == [40, 40, 20]


def test_pack_admits_small_requests_before_a_large_head() -> None:
    assert admit(PACK, [100, 2, 2], 4) == [1, 2]


def test_pack_admits_an_oversize_head_alone_when_nothing_fits() -> None:
    assert admit(PACK, [100, 100], 4) == [0]


def test_fifo_admits_an_oversize_head_alone_and_stops_at_a_misfit() -> None:
    assert admit(FIFO, [100, 2, 2], 4) == [0]
    assert admit(FIFO, [2, 100, 2], 4) == [0]
    assert admit(FIFO, [2, 2, 2], 4) == [0, 1]


def subsets(costs: list[int], max_tokens: int, max_requests: int) -> list[tuple[int, ...]]:
    return [
        chosen
        for size in range(1, min(len(costs), max_requests) + 1)
        for chosen in combinations(range(len(costs)), size)
        if sum(costs[i] for i in chosen) <= max_tokens
    ]


@given(
    costs=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    max_requests=st.integers(1, 8),
)
def test_pack_maximizes_the_number_then_minimizes_the_cost(
    costs: list[int], max_tokens: int, max_requests: int
) -> None:
    found = admit(PACK, costs, max_tokens, max_requests)
    possible = subsets(costs, max_tokens, max_requests)
    if not possible:
        assert found == [0]
        return
    # Maximum requests, then minimum tokens, then the earliest of equal costs.
    best = min(
        possible,
        key=lambda chosen: (-len(chosen), sum(costs[i] for i in chosen), chosen),
    )
    assert len(found) == len(best)
    assert sum(costs[i] for i in found) == sum(costs[i] for i in best)
    assert (
        sorted((costs[i], i) for i in found)
        == sorted(zip(costs, range(99), strict=False))[: len(best)]
    )
    assert found == sorted(found), "admitted requests are in queue order"


@given(
    costs=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    max_requests=st.integers(1, 8),
)
def test_fifo_admits_the_longest_prefix_that_fits(
    costs: list[int], max_tokens: int, max_requests: int
) -> None:
    found = admit(FIFO, costs, max_tokens, max_requests)
    beginnings = [
        list(range(size))
        for size in range(1, min(len(costs), max_requests) + 1)
        if sum(costs[:size]) <= max_tokens
    ]
    assert found == (beginnings[-1] if beginnings else [0])


@given(
    items=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    lacking=st.sets(st.integers(0, 7)),
)
def test_no_request_overtakes_a_more_urgent_one_without_pages(
    items: list[tuple[int, int]], max_tokens: int, lacking: set[int]
) -> None:
    ordered = [Item(*item, item[0]) for item in sorted(items, key=lambda item: -item[1])]
    for policy in POLICIES.values():
        budget = StepBudget(10_000, 0, max_prefill_tokens=max_tokens, chunked=False)
        round_ = AdmissionRound(policy, ordered, budget.headroom([], 99))
        refused = []
        while (index := round_.next()) is not None:
            round_.report(Outcome.NO_CAPACITY if index in lacking else Outcome.ENTERED)
            if index in lacking:
                refused.append(ordered[index].level)
        entered = round_.lengths
        for index in entered:
            assert all(ordered[index].level >= level for level in refused)


@given(
    needs=st.lists(st.integers(2, 40), max_size=4),
    costs=st.lists(st.integers(1, 40), max_size=4),
    max_tokens=st.integers(1, 40),
    num_decodes=st.integers(0, 8),
    share=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_the_budget_is_never_exceeded_nor_left_unused(
    needs: list[int], costs: list[int], max_tokens: int, num_decodes: int, share: float
) -> None:
    budget = StepBudget(max_tokens, num_decodes, share=share)
    headroom = budget.headroom(needs, 99)
    new = [headroom.take(cost) for cost in costs if headroom.is_open]
    costs = costs[: len(new)]
    lengths = budget.allot(needs, new, costs)
    available = max_tokens - min(max_tokens, num_decodes)
    assert sum(lengths) == min(available, sum(needs) + sum(costs))
    wants = needs + costs
    assert all(0 <= length <= need for length, need in zip(lengths, wants, strict=True))
    assert all(lengths[len(needs) :]), "every admitted request computes something"
    most = max(1, int(share * available))
    if needs and available and sum(min(cost, most) for cost in costs) >= available:
        # Others need all tokens: running prefills leave them all but their share.
        assert sum(lengths[: len(needs)]) <= most


def test_a_long_prompt_delays_short_ones_by_its_share_only() -> None:
    def steps_until_first_tokens(share: float) -> list[int]:
        harness = Harness(
            max_num_batched_tokens=16,
            max_model_len=512,
            num_pages=400,
            max_num_seqs=16,
            max_prefill_share=share,
        )
        harness.submit(make_submit("long", list(range(3, 43)) * 10, max_tokens=1))
        harness.step()
        short = [harness.submit(make_submit(f"s{i}", [3 + i] * 6, max_tokens=1)) for i in range(8)]
        steps = []
        for number in range(1, 60):
            harness.step()
            steps += [number] * (sum(bool(one.tokens) for one in short) - len(steps))
        assert harness.outcomes["long", 0].finish_reason == "length"
        return steps

    assert min(steps_until_first_tokens(1.0)) > 20
    assert max(steps_until_first_tokens(0.5)) <= 8


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_costs_are_uncached_tokens(policy: str) -> None:
    harness = Harness(
        max_num_batched_tokens=64,
        num_pages=65,
        enable_chunked_prefill=False,
        prefill_admission_policy=policy,
        prefill_max_tokens=12,
    )
    warm = [3 + i for i in range(40)]
    harness.submit(make_submit("warm", warm, max_tokens=1))
    harness.drain()
    harness.submit(make_submit("cold", [9] * 11, max_tokens=1))
    harness.submit(make_submit("cached", warm[:39], max_tokens=1))
    plan = harness.schedule()
    assert plan is not None
    # 3 of 39 tokens are not cached, which leaves too little for 11 others.
    assert [row.length for row in plan.rows] == ([11] if policy == "fifo" else [3])
    harness.apply()
    harness.drain()


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    harness = Harness(
        max_num_batched_tokens=8,
        max_num_seqs=1,
        num_pages=65,
        schedule_policy="lpm",
    )
    warm = [3 + i for i in range(16)]
    harness.submit(make_submit("warm", warm, max_tokens=1))
    harness.drain()
    for name, tokens in (("none", [9] * 8), ("some", [*warm[:8], 1]), ("most", [*warm, 1])):
        harness.submit(make_submit(name, tokens, max_tokens=1, ignore_eos=True))
    order = []
    while harness.step():
        order += [
            key[0]
            for key, outcome in harness.outcomes.items()
            if outcome.finish_reason and key[0] not in order
        ]
    assert order == ["warm", "most", "some", "none"]


def test_every_nth_round_is_fifo() -> None:
    harness = Harness(
        max_num_batched_tokens=64,
        num_pages=200,
        max_num_seqs=16,
        enable_chunked_prefill=False,
        prefill_admission_policy="pack",
        prefill_max_tokens=4,
        prefill_force_fifo_every=3,
    )
    large = harness.submit(make_submit("large", [5] * 20, max_tokens=1))
    for i in range(20):
        harness.submit(make_submit(f"s{i}", [6 + i % 9] * 4, max_tokens=1))
    for _ in range(2):
        harness.step()
        assert not large.tokens
    harness.step()
    assert large.tokens


def test_admission_options_change_at_run_time() -> None:
    harness = Harness(
        max_num_batched_tokens=64,
        num_pages=65,
        enable_chunked_prefill=False,
        prefill_max_tokens=4,
    )
    large = harness.submit(make_submit("large", [5] * 20, max_tokens=1))
    small = harness.submit(make_submit("small", [6] * 4, max_tokens=1))
    harness.scheduler.set_admission(AdmissionChange({"prefill_admission_policy": "pack"}))
    harness.step()
    assert small.tokens
    assert not large.tokens
    with pytest.raises(ValueError, match="max_prefill_share in --scheduler-config"):
        harness.scheduler.set_admission(AdmissionChange({"max_prefill_share": 0.0}))
    harness.drain()


@pytest.mark.parametrize("chunked", [True, False])
def test_no_request_starves_in_thousands_of_rounds(chunked: bool) -> None:
    """A flood of small requests never ends; the number of passes over each large one is bounded."""
    rng = random.Random(5)
    harness = Harness(
        checked=False,
        max_num_batched_tokens=48,
        max_model_len=64,
        num_pages=129,
        max_num_seqs=8,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=False,
        prefill_admission_policy="pack",
        prefill_max_tokens=16,
    )
    scheduler = harness.scheduler
    queue = scheduler.state.queue
    entered: dict[str, int] = {}
    waits: list[int] = []
    count = rounds = 0
    while rounds < cases(10_000, 20):
        while queue.num_requests < 24:
            count += 1
            large = rng.random() < 0.1
            name = f"{'large' if large else 'small'}{count}"
            length = rng.randint(20, 40) if large else rng.randint(1, 6)
            submit = make_submit(name, [3] * length, max_tokens=2, ignore_eos=True)
            entered[name] = rounds
            scheduler.add(submit)
        before = scheduler.admission.num_rounds
        plan = scheduler.schedule()
        assert plan is not None
        harness.device.launch(plan)
        scheduler.apply(harness.device.run())
        scheduler.take_report()
        rounds += scheduler.admission.num_rounds - before
        for name in list(entered):
            request = scheduler.state.requests.get(name)
            if request is None or request.lease is not None:
                waits.append(rounds - entered.pop(name))
    # At most 23 others were there before: (k + 1) passes, and rounds in which nothing fits.
    assert max(waits) <= 24 * (MAX_PASSES + 2)
    assert max(waits) > MAX_PASSES // 2, "no request was ever passed over: the test is meaningless"
    assert len(waits) > cases(5_000, 10)
    assert all(rounds - since <= 24 * (MAX_PASSES + 2) for since in entered.values())


def test_the_most_urgent_oversize_request_gets_its_own_step() -> None:
    headroom = StepBudget(50, 0, max_prefill_tokens=4, chunked=False).headroom([], 9)
    items = [Item(20, 9, 20), Item(20, 9, 20), Item(1, 4, 1)]
    assert play(PACK, items, headroom) == {0: 20}
    assert isinstance(headroom, StepHeadroom)


def test_each_name_has_its_policy() -> None:
    assert set(POLICIES) == set(get_args(AdmissionPolicyName))
    assert set(ORDERS) == set(get_args(SchedulePolicy))
