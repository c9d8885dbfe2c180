"""Prefill limit: the time that prefill may take in a step so that decodes meet their targets."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from worker.core.request import Request
from worker.protocol.step_time import StepCosts

RESERVE = 0.05
"""Part of a decode's target that a step leaves unused, since predictions err by a few percent."""
LATE_PART = 0.75
"""Prefill time next to decodes that miss their target even without prefill, as a fraction of it: as
much as next to decodes that take a quarter of their target, about as many as a server runs."""


def prefill_limit_s(decodes: Sequence[Request], costs: StepCosts, default_s: float) -> float:
    """Seconds that prefill may add to a step with these decodes; infinite for no limit.

        │ decodes │ prefill                            │ reserve │
        └──────── smallest target per token of the decodes ──────┘

    The target limits each gap between tokens, not only their mean. Longer steps while decodes are
    ahead of their deadlines (FairBatching, arXiv 2510.14392) would also meet the mean: in
    simulations of chats, with steps of at most 2.5 targets, TTFT was 5 to 8 % lower, and the 99th
    percentile of the gaps 2.5 times as high.

    If decodes alone take as long as the target, limiting prefill by it would not help them, and
    delay prompts.

    Args:
        decodes: decoding requests of the step.
        costs: predicted step times.
        default_s: target in seconds per token of requests without one; 0 for none.
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
