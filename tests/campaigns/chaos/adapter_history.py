"""History of a fleet's LoRA adapters, and verdicts on answers given while they were changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tests.campaigns.chaos.answers import Answer, difference
from tests.campaigns.chaos.client import Outcome
from tests.campaigns.chaos.faults import Fault
from tests.campaigns.chaos.tally import is_cut

Weights = str | None
"""Key of an adapter's weights, or of the base model's; None while a name is not loaded."""
Right = Mapping[tuple[str, int], Answer]
"""Expected answers by key of the weights and number of the prompt."""
Verdict = Literal["completed", "not_loaded", "cut", "wrong", "failed"]
_NOT_FOUND: Final = 404
_BEFORE_S: Final = 2.0
"""Seconds before a request within which the previous weights are reported as stale."""


@dataclass(kw_only=True, slots=True)
class _Period:
    weights: Weights
    since: float
    """Time at which the change to these weights was first requested."""
    until: float = math.inf
    """Time at which the change to other weights was confirmed."""


class AdapterHistory:
    """Weights of each name over time. Times are on the monotonic clock, in seconds.

    Between the first request of a change and its confirmation, a gateway may use either weights.

    Args:
        initial: weights by name before the first change.
    """

    def __init__(self, initial: Mapping[str, Weights]) -> None:
        self._periods = {
            name: [_Period(weights=weights, since=-math.inf)] for name, weights in initial.items()
        }

    def begin(self, name: str, weights: Weights, now: float) -> None:
        """Records that a change is requested for the first time."""
        self._periods[name].append(_Period(weights=weights, since=now))

    def confirm(self, name: str, now: float) -> None:
        """Records that the last change of a name is confirmed."""
        for period in self._periods[name][:-1]:
            period.until = min(period.until, now)

    def current(self, name: str) -> Weights:
        """Weights after the last change."""
        return self._periods[name][-1].weights

    def possible(self, name: str, begin: float, end: float) -> list[Weights]:
        """Weights that may be used for a request that was sent at `begin` and accepted by `end`."""
        return [p.weights for p in self._periods[name] if p.since <= end and p.until >= begin]


@dataclass(kw_only=True, slots=True)
class AdapterTally:
    """Requests by verdict, with descriptions of wrong and failed ones."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def tally_adapters(
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    history: AdapterHistory,
    right: Right,
    num_prompts: int,
) -> AdapterTally:
    """Counts outcomes of requests, whose kind is the name of their model.

    Args:
        outcomes: outcomes of all requests.
        faults: injected faults in order.
        history: weights of all names.
        right: expected answers.
        num_prompts: number of prompts; a request's index modulo this is the number of its prompt.
    """
    found = AdapterTally()
    for outcome in outcomes:
        possible = history.possible(
            outcome.request.kind, outcome.begun, outcome.head_at or outcome.ended
        )
        prompt = outcome.request.index % num_prompts
        verdict = _verdict(outcome, faults, possible, right, prompt)
        found.counts[verdict] += 1
        if verdict not in ("wrong", "failed"):
            continue
        what = outcome.error
        if verdict == "wrong":
            what = _difference(outcome, possible, history, right, prompt)
        text = f"{_place(outcome, faults)}: {what}"
        (found.wrong if verdict == "wrong" else found.failed).append(text)
    return found


def _verdict(
    outcome: Outcome,
    faults: Sequence[Fault],
    possible: Sequence[Weights],
    right: Right,
    prompt: int,
) -> Verdict:
    if outcome.end == "whole":
        is_right = any(_is(outcome.answer, weights, right, prompt) for weights in possible)
        return "completed" if is_right else "wrong"
    if outcome.status == _NOT_FOUND and None in possible:
        return "not_loaded" if outcome.request.kind in outcome.error else "failed"
    return "cut" if is_cut(outcome, faults) else "failed"


def _is(answer: Answer, weights: Weights, right: Right, prompt: int) -> bool:
    return weights is not None and difference(right[weights, prompt], answer) is None


def _difference(
    outcome: Outcome,
    possible: Sequence[Weights],
    history: AdapterHistory,
    right: Right,
    prompt: int,
) -> str:
    """Name of the weights that gave a wrong answer, or its difference from an expected one."""
    names = sorted({weights for weights, _ in right})
    found = [weights for weights in names if _is(outcome.answer, weights, right, prompt)]
    if found:
        recent = history.possible(outcome.request.kind, outcome.begun - _BEFORE_S, outcome.begun)
        stale = f", which was right up to {_BEFORE_S:g} s before" if found[0] in recent else ""
        return f"the answer of {', '.join(found)} instead of {possible}{stale}"
    expected = next((weights for weights in possible if weights is not None), None)
    if expected is None:
        return f"an answer, although it is not loaded: {outcome.answer}"
    return f"{difference(right[expected, prompt], outcome.answer)} for {possible}"


def _place(outcome: Outcome, faults: Sequence[Fault]) -> str:
    place = f"{outcome.request.kind} (request {outcome.request.index}) at {outcome.worker or '?'}"
    before = [fault for fault in faults if fault.begin <= outcome.ended]
    if not before:
        return place
    return f"{place} {outcome.ended - before[-1].begin:+.1f} s after {before[-1].kind}"
