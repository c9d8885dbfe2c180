"""Checks of agents' tool loops."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.agents.main import AgentsOptions, Played, judge
from tests.campaigns.agents.world import Question, Run, made, parsed

QUESTION = Question(question="What is 1 + 2?", calls=(("add", {"a": 1, "b": 2}),))


def played(*, is_forced: bool = False, **run: Any) -> Played:
    found = {"calls": list(QUESTION.calls), "answer": "3", **run}
    return Played(question=QUESTION, is_forced=is_forced, run=Run(**found))


def failing(*runs: Played, min_right: float | None = 0.85) -> set[str]:
    return {c.name for c in judge({"openai": runs}, min_right=min_right) if not c.holds}


def test_right_calls_hold() -> None:
    assert failing(played(), played(is_forced=True)) == set()


def test_each_fault_counts() -> None:
    assert failing(played(), played(faults=["500"])) == {"openai_faults"}
    assert failing(played(), played(is_forced=True, calls=[])) == {"openai_forced_without_a_call"}


@pytest.mark.parametrize(
    "run", [{"answer": None}, {"calls": []}, {"calls": [("add", {"a": 1, "b": 3})]}]
)
def test_an_unforced_run_is_right_or_not(run: dict[str, Any]) -> None:
    assert failing(played(**run)) == {"openai_right"}
    # Forced calls are no measure of the model, and calls that it was not trained on need not be
    # right.
    assert failing(played(), played(is_forced=True, **{**run, "calls": [("add", {})]})) == set()
    assert failing(played(**run), min_right=None) == set()


def test_models_may_call_anything() -> None:
    assert made("add", {"a": 1, "b": 2}) == ("3", False)
    assert made("nothing", {})[1]
    assert made("add", {"c": 1})[1]
    assert made("get_weather", {"city": "Rome"}) == ("no such town", True)
    assert made("get_weather", {"city": 3})[1]


def test_arguments_that_are_no_object_are_faults() -> None:
    run = Run()
    assert parsed(run, "{") is None
    assert run.call("add", [1, 2])[1]
    assert (len(run.faults), run.calls) == (2, [])


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        AgentsOptions(num_runs=1)
