"""Costs are pure, their terms add up, and every constant in them has a derivation."""

from __future__ import annotations

import ast
import pickle
from decimal import Decimal
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.fleet.constants
from router.config import PolicyName, RoutingConfig
from router.fleet import Explanation, Fleet, PromptBlocks
from router.fleet.base import total
from router.fleet.request import estimate
from router.serving.account import cost_headers
from tests.support.router.played_fleet import PlayedFleet
from worker.protocol.messages import (
    StepShape,
)

POLICIES = get_args(PolicyName)
NUM_PREFIXES = 3

Placed = tuple[int, int, int, int]
"""A request: hundredths of a second since the last, its prefix, tokens after it, its priority."""
placed = st.tuples(
    st.integers(0, 300), st.integers(0, NUM_PREFIXES - 1), st.integers(1, 3000), st.integers(0, 9)
)
Step = tuple[int, int, int]
"""A report: hundredths of a second, prompt tokens of its step, waiting tokens."""
step = st.tuples(st.integers(1, 100), st.integers(0, 2048), st.integers(0, 20_000))


def prefix(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 10**5, 1000 * (number + 1)).astype("<i4")


def prompt(which: int, tail: int, unique: int, priority: int) -> PromptBlocks:
    """A prompt that starts with a prefix and ends with unique tokens."""
    tokens = np.concatenate([prefix(which), np.full(tail, unique, "<i4")])
    blocks = PromptBlocks(tokens.tobytes())
    blocks.priority = priority
    return blocks


def fleet_after(policy: str, requests: list[Placed], steps: list[Step]) -> tuple[Fleet, float]:
    """A fleet of four workers that has placed these requests, and its time."""
    played = PlayedFleet(policy)
    played.cache("w1", prefix(1))
    for seq, (hundredths, computed, waiting) in enumerate(steps, 1):
        played.now += hundredths / 100.0
        played.load(
            f"w{seq % 4}",
            seq=seq,
            num_waiting=1 if waiting else 0,
            queued_prefill_tokens=waiting,
            step_shape=StepShape(seq, computed, computed**2 // 2, 4, 2000),
            step_ms=10.0 * hundredths,
        )
    for number, (hundredths, which, tail, priority) in enumerate(requests):
        played.now += hundredths / 100.0
        played.fleet.reserve(f"r{number}", prompt(which, tail, number, priority))
    return played.fleet, played.now


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=5, deadline=None)
@given(st.lists(placed, max_size=8), st.lists(step, max_size=8), placed)
def test_the_same_question_has_the_same_answer(
    policy: str, requests: list[Placed], steps: list[Step], probe: Placed
) -> None:
    """Bit for bit, also at other times in between; computing costs changes nothing."""
    fleet, now = fleet_after(policy, requests, steps)
    view = fleet.view(prompt(probe[1], probe[2], 99, probe[3]))

    def costs(at: float) -> bytes:
        expected = estimate(view, fleet.table, at)
        terms = fleet.policy.terms(view, expected, fleet.table, at)
        costs = total(terms)
        assert costs == pytest.approx(sum(terms.values()))
        return costs.tobytes()

    before = pickle.dumps((fleet.policy, fleet.utilisation, fleet.table))
    first = costs(now)
    later = costs(now + 7.0)
    assert costs(now) == first
    assert costs(now + 7.0) == later
    assert pickle.dumps((fleet.policy, fleet.utilisation, fleet.table)) == before


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text("abc-", min_size=1), st.floats(-1e6, 1e6), min_size=1))
def test_headers_of_terms_add_up_to_that_of_the_cost(terms: dict[str, float]) -> None:
    headers = cost_headers(Explanation(0, 0.0, terms))
    written = {name: Decimal(value) for name, value in headers.items()}
    cost = written.pop("cost")
    assert sum(written.values()) == cost
    assert set(written) == {f"cost-{name}" for name in terms}
    assert float(cost) == pytest.approx(sum(terms.values()), abs=1e-6 * len(terms))


def test_routing_has_at_most_fifteen_constants_and_each_says_why() -> None:
    source = Path(str(router.fleet.constants.__file__)).read_text()
    statements = ast.parse(source).body
    names = []
    for statement, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
            assert isinstance(following, ast.Expr), f"{names[-1]} has no docstring"
            assert isinstance(following.value, ast.Constant)
            assert len(str(following.value.value)) > 80, f"{names[-1]}: where does it come from?"
    weights = [name for name in RoutingConfig.__annotations__ if name.endswith("_weight")]
    assert len(names) + len(weights) <= 15
