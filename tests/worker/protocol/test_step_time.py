from __future__ import annotations

import random

import pytest

from worker.protocol.messages import StepShape
from worker.protocol.step_time import StepCosts, StepTimeModel

TRUTH = StepCosts(
    constant=4e-3, prefill_token=6e-5, attended=1.2e-9, decode_row=3e-5, context_token=5e-9
)


def shape_of(draw: random.Random, seq: int) -> StepShape:
    tokens = draw.choice([0, 0, draw.randint(1, 2048)])
    start, rows = draw.randint(0, 30_000), draw.randint(0, 64)
    attended = tokens * start + tokens * tokens // 2
    return StepShape(seq, tokens, attended, rows, rows * draw.randint(100, 4000))


def fitted(truth: StepCosts, num_steps: int = 400, noise: float = 0.05) -> StepTimeModel:
    draw = random.Random(0)
    model = StepTimeModel()
    learn(model, truth, draw, num_steps, noise)
    return model


def learn(
    model: StepTimeModel, truth: StepCosts, draw: random.Random, count: int, noise: float
) -> None:
    for seq in range(1, count + 1):
        shape = shape_of(draw, seq)
        model.observe(shape, truth.step(shape) * max(draw.gauss(1.0, noise), 0.1))


def test_coefficients_are_found_through_noise() -> None:
    costs = fitted(TRUTH).costs
    assert costs.constant == pytest.approx(TRUTH.constant, rel=0.1)
    assert costs.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.05)
    assert costs.attended == pytest.approx(TRUTH.attended, rel=0.1)
    draw = random.Random(1)
    for seq in range(50):
        shape = shape_of(draw, seq)
        assert costs.step(shape) == pytest.approx(TRUTH.step(shape), rel=0.1)


def test_a_term_that_costs_nothing_gets_no_negative_cost() -> None:
    truth = StepCosts(
        constant=1e-3, prefill_token=5e-5, attended=0.0, decode_row=0.0, context_token=0.0
    )
    costs = fitted(truth, noise=0.2).costs
    for value in (costs.constant, costs.attended, costs.decode_row, costs.context_token):
        assert value >= 0.0
    assert costs.prefill_token == pytest.approx(5e-5, rel=0.15)


@pytest.mark.parametrize("draft_token", [2e-5, 1e-4])
def test_costs_of_drafts_are_found_though_steps_are_held_up(draft_token: float) -> None:
    truth = StepCosts(
        constant=5e-4,
        prefill_token=1e-5,
        attended=0.0,
        decode_row=1e-4,
        context_token=0.0,
        draft_row=2e-4,
        draft_token=draft_token,
        draft_start=3e-4,
    )
    draw = random.Random(1)
    model = StepTimeModel()
    costs = model.costs
    for seq in range(600):
        rows = draw.choice((4, 30, 32, 34))
        drafting = draw.randrange(rows + 1)
        shape = StepShape(
            seq,
            prefill_tokens=draw.choice((0, 0, 40)),
            decode_rows=rows,
            draft_rows=drafting,
            draft_tokens=sum(draw.randrange(9) for _ in range(drafting)),
            draft_starts=draw.randrange(drafting // 8 + 1),
        )
        held_up = 3e-2 if seq % 50 == 49 else 0.0
        model.observe(shape, truth.step(shape) * draw.gauss(1.0, 0.02) + held_up)
        costs = model.costs if seq % 16 == 0 else costs  # each time starting from the last ones
    assert costs.draft_token == pytest.approx(draft_token, abs=1e-5)
    assert costs.draft_row == pytest.approx(2e-4, rel=0.2)
    assert costs.draft_start == pytest.approx(3e-4, rel=0.25)
    assert costs.decode_row == pytest.approx(1e-4, rel=0.1), "not attributed to drafts"


def test_outliers_move_little_and_a_change_of_speed_moves_all() -> None:
    model = fitted(TRUTH)
    draw = random.Random(2)
    for seq in range(100):
        shape = shape_of(draw, seq)
        model.observe(shape, TRUTH.step(shape) + (3.0 if seq % 20 == 0 else 0.0))
    assert model.costs.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.15)
    slower = StepCosts(**{name: 1.8 * getattr(TRUTH, name) for name in TRUTH.__struct_fields__})
    learn(model, slower, draw, 1000, 0.05)
    assert model.costs.prefill_token == pytest.approx(slower.prefill_token, rel=0.1)


def test_long_prompts_are_not_forgotten_over_short_steps() -> None:
    truth = StepCosts(
        constant=3e-3, prefill_token=1e-4, attended=1e-7, decode_row=3e-4, context_token=2e-8
    )
    draw = random.Random(3)
    model = StepTimeModel()
    for start in 30 * (0, 1024, 2048, 3072):
        shape = StepShape(0, 1024, 1024 * start + 1024 * 512, 2, 2000)
        model.observe(shape, truth.step(shape) * draw.uniform(0.95, 1.05))
    for _ in range(20_000):
        tokens = draw.choice([0, 0, 0, 8, 30])
        shape = StepShape(0, tokens, tokens * tokens // 2, 2, draw.randint(200, 4000))
        model.observe(shape, truth.step(shape) * draw.uniform(0.95, 1.05))
    long = StepShape(0, 1024, 1024 * 3072 + 1024 * 512, 2, 2000)
    assert model.costs.step(long) == pytest.approx(truth.step(long), rel=0.1)
    slower = StepCosts(**{name: 1.8 * getattr(truth, name) for name in truth.__struct_fields__})
    for _ in range(400):
        tokens = draw.randrange(1, 1025)
        start = draw.randrange(3072)
        shape = StepShape(0, tokens, tokens * start + tokens * tokens // 2, 2, 2000)
        model.observe(shape, slower.step(shape) * draw.uniform(0.95, 1.05))
    assert model.costs.step(long) == pytest.approx(slower.step(long), rel=0.1), "but learned again"


def test_unobserved_terms_keep_their_prior() -> None:
    before = StepTimeModel().costs
    model = StepTimeModel()
    for seq in range(100):
        model.observe(StepShape(seq, 0, 0, 4, 1000), 0.008)
    after = model.costs
    assert after.step(StepShape(1, 0, 0, 4, 1000)) == pytest.approx(0.008, rel=0.05)
    assert after.prefill_token == pytest.approx(before.prefill_token)


def test_parts_add_up_to_steps() -> None:
    assert TRUTH.prefill(100, 50) == pytest.approx(100 * 6e-5 + 100 * 100 * 1.2e-9)
    whole = TRUTH.step(StepShape(1, 100, 100 * 100, 8, 900))
    assert TRUTH.prefill(100, 50) + TRUTH.decode(8, 900) == pytest.approx(whole)
