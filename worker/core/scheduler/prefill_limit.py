"""Prefill limit: how long prefill may take in a step so that decodes meet their targets."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from worker.core.request import Request
from worker.protocol.step_time import StepCosts

RESERVE = 0.05
"""Fraction of a decode's target that a step leaves unused, since predictions are off by a few
percent."""
LATE_PART = 0.75
"""Prefill time, as a fraction of the target, in a step whose decodes miss their target even without
prefill. It equals the time that is left if decodes take a quarter of the target, which is typical
of servers."""


def prefill_limit_s(decodes: Sequence[Request], costs: StepCosts, default_s: float) -> float:
    """Time that prefill may add to a step with these decodes, in seconds; infinite if there is no
    limit.

        │ decodes │ prefill                            │ reserve │
        └──────── smallest target per token of the decodes ──────┘

    The target limits each gap between tokens, not only their mean. Longer steps while decodes are
    ahead of their deadlines (FairBatching, arXiv 2510.14392) would still keep the mean within the
    target. In chat simulations, allowing steps of up to 2.5 targets lowered TTFT by 5 to 8 %, but
    increased the 99th percentile of the gaps by a factor of 2.5.

    If decodes alone take as long as the target, limiting prefill to meet it would not help them and
    would delay prompts.

    Args:
        decodes: decoding requests of the step.
        costs: predicted step times.
        default_s: target, in seconds per token, of requests that set none; 0 if there is none.
    """
    targets = {request.tpot_s for request in decodes}
    if inf in targets:
        targets = {*targets - {inf}, default_s or inf}
    target_s = min(targets, default=inf)
    if target_s == inf:
        return inf
    decodes_s = costs.decode(len(decodes), sum([request.num_computed for request in decodes]))
    if decodes_s >= target_s:
        return LATE_PART * target_s
    return max((1.0 - RESERVE) * target_s - decodes_s, 0.0)
