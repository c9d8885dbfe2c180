"""Single behaviours of the scheduler, each with a device that checks every page it reads."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

from tests.support.worker.fake_device import EOS, Harness, Outcome, expected_output, make_submit
from worker.core.grammar.state import GrammarStatus
from worker.plan.plan import PlannedRow, StepResult
from worker.protocol.blocks import block_hashes, root_hash
from worker.protocol.messages import BlockStored, StepShape


def prompt(length: int, family: int = 3) -> list[int]:
    return [family + i % 40 for i in range(length)]


def test_decodes_and_prefill_chunks_share_a_step() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.submit(make_submit("a", prompt(4), max_tokens=20, ignore_eos=True))
    harness.step()
    harness.submit(make_submit("b", prompt(30, 9), max_tokens=2, ignore_eos=True))
    for start in (0, 7, 14, 21):
        plan = harness.schedule()
        assert plan is not None
        assert [row.length for row in plan.rows] == [1, 7]
        assert (plan.rows[1].start, plan.rows[1].num_samples) == (start, 0)
        harness.apply()
    plan = harness.schedule()
    assert plan is not None
    assert [row.length for row in plan.rows] == [1, 2]
    assert plan.rows[1].num_samples == 1
    harness.apply()
    harness.drain()
    harness.finished("a")
    harness.finished("b")


def test_a_step_never_exceeds_the_token_budget_even_if_decodes_fill_it() -> None:
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=4)
    for index in range(4):
        harness.submit(make_submit(f"r{index}", prompt(2, index), max_tokens=8, ignore_eos=True))
    harness.drain()
    for index in range(4):
        harness.finished(f"r{index}")


def test_a_prefix_is_hit_in_full_pages_and_leaves_a_token_to_compute() -> None:
    harness = Harness()
    first = harness.submit(make_submit("a", prompt(16), max_tokens=3))
    harness.drain()
    second = harness.submit(make_submit("b", prompt(16), max_tokens=3))
    plan = harness.schedule()
    assert plan is not None
    assert plan.rows == [PlannedRow(plan.rows[0].slot, 12, 4, 1)]
    harness.apply()
    harness.drain()
    assert (first.num_cached, second.num_cached) == (0, 12)
    load = harness.report().load
    assert (load.num_prefix_queries, load.num_prefix_hits) == (32, 12)
    assert first.tokens == second.tokens


def test_a_different_salt_misses() -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt(16), max_tokens=3, cache_salt="x", seed=1000))
    harness.drain()
    other = harness.submit(make_submit("b", prompt(16), max_tokens=3, cache_salt="y", seed=2000))
    harness.drain()
    assert other.num_cached == 0


def test_others_with_the_prefix_hit_chunks_of_a_prompt_that_is_still_being_computed() -> None:
    harness = Harness(max_num_batched_tokens=16, max_model_len=128)
    harness.submit(make_submit("a", prompt(40), max_tokens=3))
    harness.step()
    second = harness.submit(make_submit("b", prompt(40), max_tokens=3))
    harness.step()
    harness.step()
    harness.drain()
    assert second.num_cached >= 16
    harness.finished("b")


def test_chunks_of_a_step_in_flight_are_not_hit() -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt(8), max_tokens=3))
    harness.schedule()
    # One common page of six is too little to wait for.
    second = harness.submit(make_submit("b", [*prompt(4), *prompt(20, 9)], max_tokens=3))
    harness.schedule()
    harness.drain()
    assert second.num_cached == 0
    harness.finished("b")


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_requests_wait_for_a_shared_prefix_without_blocking_others(policy: str) -> None:
    harness = Harness(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=128,
        num_pages=129,
        prefill_admission_policy=policy,
    )
    for i in range(4):
        harness.submit(make_submit(f"s{i}", [*prompt(60), 5 + i], max_tokens=2, ignore_eos=True))
    other = harness.submit(make_submit("x", prompt(9, 20), max_tokens=2, ignore_eos=True))
    harness.step()
    harness.step()
    assert other.tokens
    harness.drain()
    cached = sorted(harness.finished(f"s{i}").num_cached for i in range(4))
    assert cached == [0, 60, 60, 60]
    harness.check_drained()


def test_generated_pages_are_cached_for_the_next_turn() -> None:
    harness = Harness()
    first = harness.submit(make_submit("a", prompt(8), max_tokens=9, ignore_eos=True))
    harness.drain()
    harness.submit(make_submit("b", [*prompt(8), *first.tokens, 3], max_tokens=2))
    harness.drain()
    # The last token was sampled but never computed: 16 of 17 tokens are in full pages.
    assert harness.finished("b").num_cached == 16


def test_without_prefix_caching_nothing_is_kept() -> None:
    harness = Harness(enable_prefix_caching=False)
    for name in ("a", "b"):
        outcome = harness.submit(make_submit(name, prompt(16), max_tokens=3))
        harness.drain()
        assert outcome.num_cached == 0
    assert not harness.mirror
    assert len(harness.free_pages()) == harness.config.num_pages - 1


def test_block_events_carry_the_hashes_a_gateway_computes() -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt(10), max_tokens=1, cache_salt="x", seed=1000))
    harness.step()
    data = np.asarray(prompt(10), np.int32)
    expected = block_hashes(data, 4, root_hash("m", "x"))
    assert harness.last is not None
    assert harness.last.block_events == [BlockStored(expected, None)]


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_end_as_alone_for_every_reason(depth: int) -> None:
    harness = Harness(max_num_seqs=8, num_pages=200, max_num_batched_tokens=24)
    options = [
        {"max_tokens": None},
        {"max_tokens": None, "ignore_eos": True},
        {"max_tokens": None, "ignore_eos": True, "stop_token_ids": (4, 1)},
        {"max_tokens": None, "stop_token_ids": (1, 6)},
        {"max_tokens": 1},
        {"max_tokens": 5, "ignore_eos": True},
        {"max_tokens": None, "min_tokens": 30},
        {"max_tokens": 6, "num_resumed": 4},
        {"max_tokens": 4, "num_resumed": 4},
    ]
    names = []
    for index, option in enumerate(options * 12):
        names.append(f"r{index}")
        harness.submit(make_submit(names[-1], prompt(6 + index % 40, index), seed=index, **option))
    harness.drain(depth)
    outcomes = [harness.finished(name) for name in names]
    reasons = {(outcome.finish_reason, outcome.stop_reason) for outcome in outcomes}
    assert {("stop", None), ("length", None), ("stop", 4), ("stop", 6), ("stop", 1)} <= reasons
    harness.check_drained()


def test_a_model_limit_below_max_tokens_ends_with_length() -> None:
    harness = Harness(max_model_len=12)
    harness.submit(make_submit("a", prompt(9), max_tokens=50, ignore_eos=True))
    harness.drain()
    assert len(harness.finished("a").tokens) == 3


def pressed(depth: int = 0, **limits: object) -> Harness:
    """Two requests that together outgrow the cache while they generate."""
    harness = Harness(num_pages=11, max_num_seqs=2, **limits)
    harness.submit(make_submit("old", prompt(8), max_tokens=24, ignore_eos=True))
    harness.submit(make_submit("young", prompt(8, 9), max_tokens=24, ignore_eos=True))
    harness.drain(depth)
    return harness


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_when_pages_run_out_the_youngest_is_preempted_and_resumed_exactly(
    depth: int, caching: bool
) -> None:
    harness = pressed(depth, enable_prefix_caching=caching)
    assert harness.last is not None
    assert harness.last.load.num_preemptions == 1
    harness.finished("old")
    harness.finished("young")
    harness.check_drained()


def test_the_lowest_priority_is_preempted_before_the_youngest() -> None:
    harness = Harness(num_pages=11, max_num_seqs=2)
    harness.submit(make_submit("low", prompt(8), max_tokens=24, ignore_eos=True, priority=1))
    harness.submit(make_submit("high", prompt(8, 9), max_tokens=24, ignore_eos=True))
    low, high = harness.outcomes["low", 0], harness.outcomes["high", 0]
    while high.finish_reason is None:
        harness.step()
    assert len(low.tokens) < 24
    harness.drain()
    harness.finished("low")


def test_a_resumed_request_hits_the_pages_it_left_and_reports_its_first_hit() -> None:
    harness = Harness(num_pages=11, max_num_seqs=2)
    harness.submit(make_submit("old", prompt(8), max_tokens=24, ignore_eos=True))
    young = harness.submit(make_submit("young", prompt(8, 9), max_tokens=24, ignore_eos=True))
    admits = []
    while harness.scheduler.has_work():
        plan = harness.schedule()
        if plan is not None:
            admits += [(admit, plan.rows[-1]) for admit in plan.admits]
            harness.apply()
    assert len(admits) == 3
    admit, row = admits[2]
    assert len(admit.token_ids) // 4 > 8
    assert row.start > 0
    assert young.num_cached == 0
    assert harness.report().load.num_prefix_hits == 0, "only first admissions count"


def test_with_a_step_in_flight_a_victim_is_skipped_then_preempted() -> None:
    harness = Harness(num_pages=12, max_num_seqs=3, max_num_batched_tokens=32)
    for index, length in enumerate((8, 9, 10)):
        options = {"max_tokens": 24, "ignore_eos": True}
        harness.submit(make_submit(f"r{index}", prompt(length, index), **options))
    slots: list[list[int]] = []
    while not harness.report().load.num_preemptions:
        plan = harness.schedule()
        assert plan is not None
        slots.append([row.slot for row in plan.rows])
        if len(harness.device.in_flight) > 1:
            harness.apply()
    # Oldest first: 0 lacks a page and waits; 2 is deferred, then preempted; 1 continues throughout.
    assert slots[-3:] == [[0, 1, 2], [1], [0, 1]]
    harness.drain(1)
    for index in range(3):
        harness.finished(f"r{index}")


def test_admission_reserves_pages_for_running_requests() -> None:
    harness = Harness(num_pages=10, max_num_batched_tokens=32)
    harness.submit(make_submit("long", prompt(24), max_tokens=4, ignore_eos=True))
    harness.submit(make_submit("next", prompt(8, 9), max_tokens=4, ignore_eos=True))
    plan = harness.schedule()
    assert plan is not None
    # Three free pages would hold "next" and its first token, but "long" will need one of them.
    assert [row.length for row in plan.rows] == [24]
    harness.apply()
    harness.drain()
    harness.finished("next")


def test_admission_is_first_come_first_served() -> None:
    harness = Harness(max_num_seqs=1)
    for index in range(3):
        harness.submit(make_submit(f"r{index}", prompt(5, index), max_tokens=2, ignore_eos=True))
    order = []
    while harness.step():
        for key, outcome in harness.outcomes.items():
            if outcome.finish_reason and key[0] not in order:
                order.append(key[0])
    assert order == ["r0", "r1", "r2"]


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_at_any_moment_frees_everything(depth: int) -> None:
    for moment in range(14):
        harness = Harness(num_pages=11, max_num_seqs=2)
        outcomes = [
            harness.submit(make_submit(name, prompt(8, 3 + i), max_tokens=24, ignore_eos=True))
            for i, name in enumerate(("old", "young", "waiting"))
        ]
        for _ in range(moment * 3):
            harness.step(depth)
        harness.schedule()
        for outcome in outcomes:
            harness.scheduler.abort(outcome.submit.request_id, 0)
            harness.check()
        harness.report()
        for outcome in outcomes:
            assert outcome.finish_reason in ("abort", "length")
            tokens = expected_output(outcome.submit, harness.config)[0]
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        harness.drain(depth)
        harness.check_drained()


def test_output_of_an_aborted_request_in_flight_is_dropped_and_counted() -> None:
    harness = Harness()
    outcome = harness.submit(make_submit("a", prompt(4), max_tokens=9))
    harness.schedule()
    harness.scheduler.abort("a", 0)
    assert harness.scheduler.has_work()
    harness.apply()
    assert (outcome.tokens, outcome.finish_reason) == ([], "abort")
    assert harness.scheduler.state.stats.num_dropped_tokens == 1
    assert not harness.scheduler.has_work()
    assert len(harness.free_pages()) == harness.config.num_pages - 1


def test_an_end_found_one_step_late_costs_one_dropped_token() -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt(4), max_tokens=None, stop_token_ids=tuple(range(50))))
    harness.drain(depth=1)
    assert len(harness.finished("a").tokens) == 1
    assert harness.scheduler.state.stats.num_dropped_tokens == 1


def test_a_known_final_length_wastes_no_step() -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt(4), max_tokens=3, ignore_eos=True))
    harness.drain(depth=1)
    assert harness.scheduler.state.stats.num_dropped_tokens == 0
    assert harness.device.launched == 3


def test_unknown_requests_and_older_attempts_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt(4), max_tokens=9, attempt=2))
    harness.step()
    harness.scheduler.abort("nobody", 0)
    harness.scheduler.abort("a", 1)
    with caplog.at_level(logging.WARNING):
        harness.scheduler.add(make_submit("a", prompt(9), attempt=2))
        harness.scheduler.add(make_submit("a", prompt(9), attempt=1))
    ids = [getattr(record, "request_id", None) for record in caplog.records]
    assert ids == ["a", "a"]
    harness.drain()
    harness.finished("a", 2)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_higher_attempt_replaces_the_older_silently(depth: int) -> None:
    harness = Harness()
    old = harness.submit(make_submit("a", prompt(4), max_tokens=30, ignore_eos=True))
    for _ in range(3):
        harness.step(depth)
    resumed = [*prompt(4), *old.tokens]
    harness.submit(
        make_submit(
            "a",
            resumed,
            max_tokens=30,
            ignore_eos=True,
            attempt=1,
            num_resumed=len(old.tokens),
            gateway_id="g1",
        )
    )
    harness.drain(depth)
    new = harness.finished("a", 1)
    assert old.finish_reason is None
    whole = expected_output(old.submit, harness.config)[0]
    assert whole[: len(old.tokens)] + new.tokens == whole
    harness.check_drained()


def test_every_64th_plan_carries_a_digest_of_completed_steps() -> None:
    harness = Harness(max_model_len=256, num_pages=80)
    harness.submit(make_submit("a", prompt(4), max_tokens=200, ignore_eos=True))
    digests = []
    while True:
        plan = harness.schedule()
        if plan is None:
            break
        if plan.digest_seq:
            digests.append((plan.seq, plan.digest_seq, plan.digest))
        harness.apply()
    assert [(seq, covered) for seq, covered, _ in digests] == [(64, 63), (128, 127), (192, 191)]
    for _, covered, value in digests:
        assert -(2**63) <= value < 2**63
        assert value == harness.device.digest.value(covered)


def test_sampling_parameters_reach_the_device_in_its_terms() -> None:
    harness = Harness()
    harness.submit(
        make_submit("a", prompt(4), seed=2**64 - 1, top_k=-1, top_p=0.5, min_p=0.1, temperature=0.7)
    )
    harness.submit(make_submit("b", prompt(4), temperature=0.0, top_k=5, top_p=0.5, min_p=0.1))
    plan = harness.scheduler.schedule()
    assert plan is not None
    first, second = plan.admits
    assert (first.seed, first.top_k, first.top_p, first.min_p) == (-1, 0, 0.5, 0.1)
    assert (second.temperature, second.top_k, second.top_p, second.min_p) == (0.0, 0, 1.0, 0.0)
    assert np.frombuffer(first.token_ids, "<i4").tolist() == prompt(4)
    assert (first.logits_params, second.logits_params) == (None, None)


def test_logits_params_are_only_sent_if_there_are_any() -> None:
    harness = Harness()
    fields = {"min_tokens": 3, "stop_token_ids": (9, 7), "logit_bias": {4: 1.5}, "logprobs": 0}
    harness.submit(make_submit("a", prompt(6), **fields))
    plan = harness.scheduler.schedule()
    assert plan is not None
    rules = plan.admits[0].logits_params
    assert rules is not None
    assert (rules.num_prompt, rules.min_tokens) == (6, 3)
    assert rules.stop_token_ids == sorted({*EOS, 9, 7})
    assert (rules.bias_token_ids, rules.biases) == ([4], [1.5])
    assert (rules.num_logprobs, rules.num_prompt_logprobs) == (0, -1)


def test_the_load_snapshot_has_every_number() -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=1, num_pages=21)
    harness.submit(make_submit("a", prompt(20), max_tokens=9, ignore_eos=True))
    harness.submit(make_submit("b", prompt(11, 9), max_tokens=9, ignore_eos=True))
    load = harness.report().load
    assert (load.num_running, load.num_waiting, load.queued_prefill_tokens) == (0, 2, 31)
    assert (load.num_free_pages, load.num_total_pages, load.max_num_seqs) == (20, 20, 1)
    harness.step()
    assert harness.last is not None
    load = harness.last.load
    assert (load.num_running, load.num_waiting, load.queued_prefill_tokens) == (1, 1, 12 + 11)
    assert (load.num_free_pages, load.step_ms, load.num_step_tokens) == (18, 1.5, 8)


def test_loads_report_the_shape_of_the_last_step() -> None:
    harness = Harness(max_num_batched_tokens=12)
    harness.submit(make_submit("a", prompt(6), max_tokens=9, ignore_eos=True))
    harness.submit(make_submit("b", prompt(14, 9), max_tokens=9, ignore_eos=True))
    shapes = []
    for _ in range(3):
        harness.step()
        assert harness.last is not None
        shapes.append(harness.last.load.step_shape)
    # a: 6 of its prompt, then it decodes at positions 7 and 8; b: 6 and 8 of its prompt.
    assert shapes[0] == StepShape(1, 12, 2 * (1 + 2 + 3 + 4 + 5 + 6), 0, 0)
    assert shapes[1] == StepShape(2, 8, 8 * 6 + 36, 1, 7)
    assert shapes[2] == StepShape(3, 0, 0, 2, 8 + 15)


def test_loads_report_how_many_prompt_tokens_were_scored() -> None:
    harness = Harness(max_num_batched_tokens=12)
    harness.submit(make_submit("a", prompt(20), max_tokens=3, ignore_eos=True, prompt_logprobs=2))
    scored = []
    for _ in range(3):
        harness.step()
        assert harness.last is not None
        scored.append(harness.last.load.step_shape.scored_tokens)
    # 12 of its prompt, then 8, of which the last predicts the first of the output; then it decodes.
    assert scored == [12, 7, 0]


def test_expected_hits_are_reported_for_as_long_as_requests_wait() -> None:
    harness = Harness(max_num_seqs=1)
    for name, expected in (("a", 4), ("b", 8), ("c", 12)):
        harness.submit(make_submit(name, prompt(14), max_tokens=1, num_expected_cached=expected))
    reported = [harness.report().load.queued_cached_tokens]
    harness.step()
    reported.append(harness.report().load.queued_cached_tokens)
    harness.scheduler.abort("c", 0)
    reported.append(harness.report().load.queued_cached_tokens)
    harness.drain()
    reported.append(harness.report().load.queued_cached_tokens)
    assert reported == [24, 20, 8, 0]


def test_loads_count_every_submit_even_if_it_is_ignored() -> None:
    harness = Harness()
    assert harness.report().load.num_submits_seen == 0
    harness.submit(make_submit("a", prompt(4), attempt=1))
    harness.scheduler.add(make_submit("a", prompt(4), attempt=1))
    harness.scheduler.add(make_submit("a", prompt(4), attempt=0))
    harness.scheduler.abort("a", 1)
    assert harness.report().load.num_submits_seen == 3


def test_results_of_another_step_are_rejected() -> None:
    harness = Harness()
    with pytest.raises(ValueError, match="result of step 1"):
        harness.scheduler.apply(StepResult(1, [], 0.0))
    harness.submit(make_submit("a", prompt(4)))
    harness.scheduler.schedule()
    with pytest.raises(ValueError, match="expected 1 tokens, got 2"):
        harness.scheduler.apply(StepResult(1, [3, 3], 0.0))


def test_an_idle_scheduler_plans_nothing() -> None:
    harness = Harness()
    assert not harness.scheduler.has_work()
    assert harness.scheduler.schedule() is None
    assert harness.report().deltas == {}


def test_one_request_may_fill_the_whole_cache() -> None:
    harness = Harness(num_pages=9, max_model_len=1000)
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt(31), max_tokens=None, ignore_eos=True))
        harness.submit(make_submit(name + "2", prompt(1), max_tokens=None, ignore_eos=True))
    harness.drain()
    for name in ("a", "b", "a2", "b2"):
        harness.finished(name)
    assert len(harness.outcomes["b2", 0].tokens) == 31


def test_the_same_calls_make_the_same_plans() -> None:
    runs = []
    for _ in range(2):
        rng = random.Random(5)
        harness = Harness(num_pages=14)
        plans = []
        for index in range(40):
            length = rng.randint(1, 20)
            harness.submit(make_submit(f"r{index}", prompt(length), max_tokens=9, seed=index))
            plans.append(harness.schedule())
            if plans[-1] is not None:
                harness.apply()
        runs.append(plans)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_pages", [7, 9, 12])
@pytest.mark.parametrize("length", [4, 10, 19])
def test_equal_prompts_in_a_small_cache_all_end(depth: int, num_pages: int, length: int) -> None:
    """They compute the same pages at the same time, and only one set of them is cached."""
    harness = Harness(num_pages=num_pages, max_num_batched_tokens=64)
    for name in "abc":
        harness.submit(make_submit(name, prompt(length), max_tokens=40, ignore_eos=True))
    harness.drain(depth)
    for name in "abc":
        harness.finished(name)
    harness.check_drained()


def test_a_repeated_submit_is_ignored_and_reported() -> None:
    harness = Harness()
    scheduler = harness.scheduler
    one = make_submit("a", [3] * 4, max_tokens=3, ignore_eos=True)
    later = make_submit("a", [3] * 4, max_tokens=3, ignore_eos=True, attempt=1)
    harness.outcomes[("a", 1)] = Outcome(later)
    assert scheduler.add(later)
    for _ in range(2):
        assert not scheduler.add(later), "the same attempt"
        assert not scheduler.add(one), "an earlier one"
        assert not scheduler.provide("a", 1, GrammarStatus()), "it was not held"
        harness.step()
    harness.drain()
    harness.finished("a", 1)
