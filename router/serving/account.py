"""Reports routing decisions as counters, response headers and lines of the decision log."""

from __future__ import annotations

from decimal import Decimal

from router.explain import DecisionLine
from router.fleet import BlockKey, Choice, Explanation
from router.metrics.stats import ModelStats
from router.serving.completion import Completion
from router.serving.generation import Generation


def count_choice(stats: ModelStats, completion: Completion, choice: Choice) -> None:
    """Adds the predicted hits and the regret of a completion's decision to the counters."""
    stats.hit_tokens += choice.hit_tokens
    spec = completion.spec
    if spec.index % spec.feasibility.sampling.n == 0 and not completion.num_losses:
        stats.saved_tokens += choice.hit_tokens
    stats.achievable_hit_tokens += choice.best_hit_tokens
    if choice.explanation is not None:
        stats.pooled_hit_tokens += choice.explanation.pooled_hit_tokens
        stats.regret_s += choice.explanation.regret_s


def explanation_headers(generation: Generation) -> list[tuple[bytes, bytes]]:
    """Headers that explain the routing decision of a response's first completion.

    Empty unless decisions are explained. Streams have no headers for cached tokens and the time to
    first token, which are not known yet.
    """
    if not generation.explain:
        return []
    completion = generation.completions[0]
    choice = completion.choice
    if choice is None or choice.explanation is None:
        return []
    values = {
        **cost_headers(choice.explanation),
        "hit-tokens": str(choice.hit_tokens),
        "achievable-hit-tokens": str(choice.best_hit_tokens),
        "pooled-hit-tokens": str(choice.explanation.pooled_hit_tokens),
        "predicted-ttft-ms": f"{choice.first_token_s * 1000.0:.1f}",
        "regret-ms": f"{choice.explanation.regret_s * 1000.0:.1f}",
    }
    if completion.visit is not None:
        values["session-wait-ms"] = f"{completion.visit.wait_s * 1000.0:.1f}"
    if completion.finished:
        values["cached-tokens"] = str(completion.num_cached_tokens)
        values["ttft-ms"] = f"{completion.times.first_token_s * 1000.0:.1f}"
    return [(b"x-rayfleet-" + name.encode(), value.encode()) for name, value in values.items()]


def cost_headers(explanation: Explanation) -> dict[str, str]:
    """A decision's cost and its terms, in the policy's unit (adaptive: seconds).

    As written in the headers, the terms add up to the cost.
    """
    texts = {f"cost-{name}": f"{value:.6f}" for name, value in explanation.terms.items()}
    return {"cost": str(sum(map(Decimal, texts.values()), Decimal())), **texts}


def decision_line(completion: Completion) -> DecisionLine | None:
    """The decision-log line of a finished completion; None if it never reached a worker."""
    choice, spec = completion.choice, completion.spec
    if choice is None or choice.explanation is None:
        return None
    prompt = spec.prompt
    return DecisionLine(
        request_id=spec.request_id,
        at=completion.times.arrived_at,
        num_tokens=prompt.num_tokens,
        num_output=len(completion.token_ids),
        page_size=choice.info.page_size,
        hashes=prompt.hashes(BlockKey.of(choice.info)).astype("<u8").tobytes(),
        session=prompt.session,
        worker_id=choice.worker_id,
        attempt=completion.attempt,
        hit_tokens=choice.hit_tokens,
        achievable_hit_tokens=choice.best_hit_tokens,
        pooled_hit_tokens=choice.explanation.pooled_hit_tokens,
        cached_tokens=completion.num_cached_tokens,
        predicted_s=choice.first_token_s,
        first_token_s=completion.times.first_token_s,
        regret_s=choice.explanation.regret_s,
        session_wait_s=0.0 if completion.visit is None else completion.visit.wait_s,
    )
