"""Log-probabilities on their way from a step's result to the requests that asked."""

from __future__ import annotations

from worker.scheduler.plan import StepResult
from worker.scheduler.step import StepInFlight


def take_logprobs(step: StepInFlight, result: StepResult) -> None:
    """Notes a result's log-probabilities in its requests; stale ones are dropped."""
    drawn = iter(result.logprobs or ())
    prompts = result.prompt_logprobs or {}
    for index, (request, lease, _, sample) in enumerate(step.shares):
        logprobs = next(drawn, None) if sample else None
        if request.lease is not lease:
            continue
        if logprobs is not None:
            request.logprobs.append(logprobs)
        if request.prompt_logprobs is not None and index in prompts:
            request.prompt_logprobs += prompts[index]
