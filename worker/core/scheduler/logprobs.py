"""Log-probabilities on their way from a step's result to the requests that asked."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.scheduler.step import StepInFlight
from worker.plan.plan import StepResult


def take_logprobs(step: StepInFlight, result: StepResult, counts: Sequence[int]) -> None:
    """Notes a result's log-probabilities in its requests; stale ones are dropped.

    Args:
        step: as it was planned.
        result: what it yields.
        counts: how many of the result's tokens each row has.
    """
    drawn = result.logprobs or ()
    prompts = result.prompt_logprobs or {}
    next_token = 0
    for index, (one, count) in enumerate(zip(step.rows, counts, strict=True)):
        request = one.request
        first_token, next_token = next_token, next_token + count
        if one.is_stale:
            continue
        request.logprobs += [one for one in drawn[first_token:next_token] if one is not None]
        if request.prompt_logprobs is not None and index in prompts:
            request.prompt_logprobs += prompts[index]
