"""Decodes that are skipped for prompts, and prompts that are skipped for much more urgent ones."""

from __future__ import annotations

import random

import pytest

from tests.support.effort import cases
from tests.support.worker.fake_device import Harness, make_submit
from tests.support.worker.scheduler_campaign import random_admission
from worker.plan.plan import Plan
from worker.protocol.admission import AdmissionOptions
from worker.protocol.slo import Slo


def submit(harness: Harness, name: str, length: int, max_tokens: int, priority: int = 4) -> None:
    token = sum(map(ord, name)) % 90 + 3  # no two share a prefix
    harness.submit(
        make_submit(
            name, [token] * length, max_tokens=max_tokens, ignore_eos=True, priority=priority
        )
    )


def plans(harness: Harness, count: int) -> list[Plan]:
    found = []
    for _ in range(count):
        plan = harness.schedule()
        if plan is None:
            break
        found.append(plan)
        harness.apply()
    return found


def backlog(steps: int, decoding: int, prompts: int = 4) -> tuple[Harness, list[bool]]:
    """Whether each step decodes, while ten prompts of a whole step each wait after a decode."""
    harness = Harness(
        max_num_seqs=16,
        max_num_batched_tokens=16,
        num_pages=200,
        enable_prefix_caching=False,
        prefill_first_steps=steps,
        max_prefill_share=1.0,
    )
    submit(harness, "decoding", 4, 30, decoding)
    plans(harness, 2)
    for number in range(10):
        submit(harness, f"prompt{number}", 16, 2, prompts)
    return harness, [any(row.length == 1 for row in plan.rows) for plan in plans(harness, 9)]


def test_decodes_are_skipped_for_a_maximum_of_consecutive_steps() -> None:
    harness, decodes = backlog(3, 4)
    assert decodes == [False] * 3 + [True] + [False] * 3 + [True] + [False]
    harness.drain()
    harness.finished("decoding")
    for number in range(10):
        harness.finished(f"prompt{number}")
    harness.check_drained()


def test_no_decode_is_skipped_by_default_or_for_less_urgent_prompts() -> None:
    assert backlog(0, 4)[1] == [True] * 9
    assert backlog(3, 5)[1] == [True] * 9


def test_no_decode_is_skipped_if_prompts_do_not_fill_a_step() -> None:
    harness = Harness(
        max_num_batched_tokens=16,
        num_pages=100,
        prefill_first_steps=3,
    )
    submit(harness, "decoding", 4, 10)
    plans(harness, 2)
    submit(harness, "prompt", 12, 2)
    (plan,) = plans(harness, 1)
    assert sorted(row.length for row in plan.rows) == [1, 12]


def test_no_decode_is_skipped_if_prompts_lack_pages() -> None:
    harness = Harness(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        num_pages=8,
        enable_prefix_caching=False,
        prefill_first_steps=3,
    )
    submit(harness, "decoding", 12, 4)
    plans(harness, 2)
    for name in ("c", "d"):
        submit(harness, name, 18, 2)
    found = plans(harness, 2)
    assert all(any(row.length == 1 for row in plan.rows) for plan in found), found
    harness.drain()
    harness.finished("d")


def test_no_decode_is_skipped_without_a_free_slot() -> None:
    harness = Harness(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_pages=100,
        prefill_first_steps=3,
    )
    for name in ("a", "b"):
        submit(harness, name, 4, 10)
    plans(harness, 2)
    for name in ("c", "d"):
        submit(harness, name, 16, 2)
    assert [len(plan.rows) for plan in plans(harness, 4)] == [2] * 4


@pytest.mark.parametrize(("urgent", "shared"), [(7, False), (6, True)])
def test_an_urgent_prompt_gets_the_step_to_itself(urgent: int, shared: bool) -> None:
    harness = Harness(max_num_batched_tokens=16, num_pages=100, max_num_seqs=8)
    submit(harness, "under way", 40, 2)
    plans(harness, 1)
    submit(harness, "waiting", 40, 2)
    submit(harness, "urgent", 32, 2, urgent)
    first, second = plans(harness, 2)
    if shared:
        # It goes first, but does not block others; each admitted request gets at least one token.
        assert sorted(row.length for row in first.rows) == [1, 15]
    else:
        assert [row.length for row in [*first.rows, *second.rows]] == [16, 16]
    harness.drain()
    for name in ("under way", "waiting", "urgent"):
        harness.finished(name)
    harness.check_drained()


def urgent_beside_decodes(
    urgent: int, length: int, num_decodes: int = 6, steps: int = 4
) -> tuple[Harness, list[list[int]]]:
    """Row lengths of each step after the arrival of an urgent prompt, longest first."""
    harness = Harness(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=512,
        num_pages=400,
        urgent_first_steps=steps,
    )
    for number in range(num_decodes):
        submit(harness, f"decoding{number}", 4, 60)
    plans(harness, 2)
    submit(harness, "urgent", length, 2, urgent)
    lengths = [
        sorted((row.length for row in plan.rows), reverse=True) for plan in plans(harness, 12)
    ]
    return harness, lengths


def test_decodes_are_skipped_for_an_urgent_prompt_of_several_steps() -> None:
    harness, lengths = urgent_beside_decodes(7, 80)
    # 32 + 32 alone, then the tokens left by all decodes.
    assert lengths[:3] == [[32], [32], [16, *[1] * 6]]
    harness.drain()
    for number in range(6):
        harness.finished(f"decoding{number}")
    harness.check_drained()


def test_skipped_decodes_get_their_turn_after_a_maximum_of_steps() -> None:
    _, lengths = urgent_beside_decodes(7, 300, steps=2)
    assert lengths[:7] == [[32], [32], [26, *[1] * 6]] * 2 + [[32]]


@pytest.mark.parametrize(
    ("urgent", "length", "num_decodes", "steps"),
    [
        (6, 80, 6, 4),  # does not outrank them
        (7, 20, 6, 4),  # fits in addition to them
        (7, 80, 3, 4),  # they are too few
        (7, 80, 6, 0),
    ],
)
def test_decodes_are_not_skipped_if_that_gains_little(
    urgent: int, length: int, num_decodes: int, steps: int
) -> None:
    _, lengths = urgent_beside_decodes(urgent, length, num_decodes, steps)
    assert all(found.count(1) >= num_decodes for found in lengths)


@pytest.mark.parametrize(
    ("token_ms", "length", "alone"),
    [
        (1.0, 20, True),
        (1.0, 200, False),
        (0.1, 20, False),  # a step of their own would take longer
        (0.0, 20, False),
    ],
)
def test_decodes_are_skipped_if_they_take_much_of_the_time(
    token_ms: float, length: int, alone: bool
) -> None:
    """However few tokens they are: with a short prompt, unless rows cost nothing."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
    harness = Harness(**limits, num_pages=400, default_tpot_ms=0)
    harness.device.token_ms = token_ms
    submit(harness, "first", 40, 4, 7)
    plans(harness, 4)
    for number in range(6):
        submit(harness, f"decoding{number}", 4, 60)
        plans(harness, 4)
    submit(harness, "urgent", length, 2, 7)
    first, second = plans(harness, 2)
    assert sorted((row.length for row in first.rows), reverse=True) == (
        [length] if alone else [length, *[1] * 6]
    )
    assert len(second.rows) == 7
    harness.drain()
    for number in range(6):
        harness.finished(f"decoding{number}")
    harness.check_drained()


def test_a_deadline_takes_no_tokens_from_running_equals() -> None:
    harness = Harness(max_num_batched_tokens=16, num_pages=100, max_num_seqs=8)
    submit(harness, "under way", 60, 2)
    plans(harness, 1)
    near = make_submit("near", [9] * 60, max_tokens=2, ignore_eos=True, slo=Slo(ttft_ms=30_000))
    harness.submit(near)
    harness.now += 29.96
    (plan,) = plans(harness, 1)
    assert sorted(row.length for row in plan.rows) == [8, 8]


def test_a_negative_number_of_steps_is_rejected() -> None:
    with pytest.raises(ValueError, match="urgent_first_steps in --scheduler-config"):
        AdmissionOptions(urgent_first_steps=-1)
    with pytest.raises(ValueError, match="prefill_first_steps in --scheduler-config"):
        AdmissionOptions(prefill_first_steps=-1)


def test_urgent_requests_do_not_wait_for_prefixes_of_less_urgent_ones() -> None:
    harness = Harness(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256, num_pages=200)
    shared = [7] * 60
    harness.submit(make_submit("low", [*shared, 3], max_tokens=2, ignore_eos=True, priority=1))
    plans(harness, 1)
    # While other urgent prompts are computed, "low" is skipped in each step.
    submit(harness, "other", 200, 2, 9)
    urgent = harness.submit(
        make_submit("urgent", [*shared, 4], max_tokens=2, ignore_eos=True, priority=9)
    )
    plans(harness, 10)
    assert urgent.tokens
    harness.drain()
    harness.finished("low")
    harness.check_drained()


@pytest.mark.parametrize(("target_ms", "most"), [(0, 1023), (1, 64), (150, 140), (10**6, 1023)])
def test_decodes_wait_no_longer_than_the_limit_for_prompts(target_ms: int, most: int) -> None:
    """A long prompt takes what recent steps predict until a decode's target, and the whole budget
    otherwise."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "max_model_len": 4096}
    harness = Harness(
        **limits, num_pages=2000, default_tpot_ms=target_ms, enable_prefix_caching=False
    )
    harness.device.token_ms = 1.0
    for number in range(12):  # so that costs are known
        submit(harness, f"earlier{number}", 40 + 10 * number, 4)
        harness.drain()
    submit(harness, "alone", 1500, 2)
    assert max(row.length for row in plans(harness, 1)[0].rows) == 1024
    harness.drain()
    submit(harness, "decoding", 4, 60)
    plans(harness, 3)
    submit(harness, "long", 1800, 2)
    lengths = [sorted(row.length for row in plan.rows) for plan in plans(harness, 3)]
    if most == 1023:
        assert [length[-1] for length in lengths[:2]] == [1023, 777]
    else:
        assert all(length[0] == 1 for length in lengths), "the decode is in every step"
        assert [length[-1] for length in lengths] == pytest.approx([most] * 3, rel=0.15)
    harness.drain()
    harness.finished("long")
    harness.check_drained()


def test_a_prompt_gets_all_tokens_beside_a_last_token_in_flight() -> None:
    harness = Harness(
        max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=4096, num_pages=2000
    )
    harness.device.token_ms = 1.0
    for number in range(12):  # so that costs are known
        submit(harness, f"earlier{number}", 40 + 10 * number, 4)
        harness.drain()
    submit(harness, "ending", 4, 2)
    plans(harness, 1)
    harness.schedule()  # in flight: its last token
    submit(harness, "long", 1800, 2)
    plan = harness.schedule()
    assert plan is not None
    assert [row.length for row in plan.rows] == [1024]
    harness.drain()
    harness.finished("ending")
    harness.finished("long")
    harness.check_drained()


def test_decodes_run_when_prompts_lack_pages() -> None:
    """Regression test: such a step was empty, which crashed the engine."""
    harness = Harness(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        num_pages=72,
        max_model_len=256,
        enable_prefix_caching=False,
        prefill_first_steps=1,
    )
    for number in range(5):
        submit(harness, f"decoding{number}", 9, 60)
    plans(harness, 4)
    submit(harness, "prompt", 200, 4)
    harness.drain()
    for number in range(5):
        harness.finished(f"decoding{number}")
    harness.finished("prompt")
    harness.check_drained()


@pytest.mark.parametrize("seed", range(cases(150, 15)))
def test_a_long_prompt_with_decodes_and_scarce_pages_always_ends(seed: int) -> None:
    """Regression test with any admission options, a quarter of which crashed the engine."""
    rng = random.Random(seed)
    page_size, num_decodes, length = rng.choice([1, 4]), rng.randint(1, 8), rng.choice([100, 300])
    # As many as admission reserves for all of them, and a few more.
    num_pages = num_decodes * (-(-13 // page_size) + 1) + -(-length // page_size)
    harness = Harness(
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice([8, 16, 32]),
        num_pages=1 + num_pages + rng.randint(0, 4),
        page_size=page_size,
        max_model_len=512,
        enable_prefix_caching=rng.random() < 0.5,
        checked=False,
        **random_admission(rng),
    )
    depth = rng.randrange(2)
    for number in range(num_decodes):
        submit(harness, f"decoding{number}", 9, 120)
    for _ in range(4):
        harness.step(depth)
    submit(harness, "prompt", length, 4)
    harness.drain(depth)
    for number in range(num_decodes):
        harness.finished(f"decoding{number}")
    harness.finished("prompt")
