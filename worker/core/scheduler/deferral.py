"""Decode deferral: skips decodes in some steps to reduce time to first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker.core.request import Request
from worker.core.scheduler.admission import Admission
from worker.core.scheduler.state import SchedulerState

_GOOD_PART = 0.125
"""Minimum fraction of a step (tokens or time) that decodes must take to be deferred."""


class Deferrable(NamedTuple):
    """Decodes that a step may skip."""

    requests: Mapping[str, Request]
    """Decoding requests by id."""
    num_tokens: int
    """Minimum number of prompt tokens in the step for a deferral to be worthwhile."""


_NONE = Deferrable({}, 0)


class DecodeDeferral:
    """Selects decodes to skip, for as many consecutive steps as the options allow.

    Decodes are skipped if prompts of at least equal urgency fill the step (`prefill_first_steps`).
    Decodes are also skipped if prompts outrank them by the preemption gap and the decodes would
    take at least 1/8 of the step in tokens or time (`urgent_first_steps`).
    """

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._gap = state.config.preempt_priority_gap
        self.num_steps = 0
        """Number of consecutive steps that skipped decodes."""

    def is_outranked(self, request: Request, level: int) -> bool:
        """Whether a request of `level` outranks `request` by the preemption gap."""
        return self._gap > 0 and request.level <= level - self._gap

    def candidates(
        self,
        members: Sequence[tuple[Request, int]],
        prompts: Sequence[tuple[Request, int]],
        oldest: Request | None,
        max_prompts: int,
    ) -> Deferrable:
        """Decodes that could be skipped for running prefills and waiting prompts.

        Args:
            members: running requests and their pending tokens.
            prompts: members that are running prefills.
            oldest: the request that has been in the queue's highest level for the longest time, if
                it could be admitted; otherwise None.
            max_prompts: number of prompt tokens in a step without decodes.
        """
        level = max([r.level for r, _ in prompts], default=-1)
        if oldest is not None:
            level = max(level, oldest.level)
        if level < 0:
            return _NONE  # no prompts
        decodes = {r.request_id: r for r, pending in members if pending == 1 and r.level <= level}
        options = self._admission.options
        if self.num_steps < options.prefill_first_steps and (
            self._num_prompt_tokens(prompts) >= max_prompts
        ):
            return Deferrable(decodes, self._state.config.max_num_batched_tokens)
        if self.num_steps >= options.urgent_first_steps:
            return _NONE
        # Priorities, not levels: a deadline may have raised the level for the first token.
        outranked = {
            name: r for name, r in decodes.items() if self._gap and r.priority <= level - self._gap
        }
        if not outranked:
            return _NONE
        num_tokens = sum(n for r, n in prompts if not self.is_outranked(r, level))
        if oldest is not None and not self.is_outranked(oldest, level):
            num_tokens += self._admission.cost(oldest)
        if self._takes_good_part(outranked, num_tokens):
            return Deferrable(outranked, num_tokens)
        return _NONE

    def decide(
        self, candidates: Deferrable, num_prompt_tokens: int, max_prompts: int
    ) -> Mapping[str, Request]:
        """Decodes that the step skips; empty if the prompts were not admitted for lack of slots or
        pages.

        Args:
            candidates: result of `candidates` for this step.
            num_prompt_tokens: number of prompt tokens in the step.
            max_prompts: number of prompt tokens for which the step has room.
        """
        deferred = candidates.requests
        if _falls_short(candidates, num_prompt_tokens, max_prompts):
            deferred = {}
        self.num_steps = self.num_steps + 1 if deferred else 0
        return deferred

    def withdraws(self, candidates: Deferrable, num_prompt_tokens: int, max_prompts: int) -> bool:
        """Whether the step must include its skipped decodes after all, because running prefills
        found too few pages; if so, resets `num_steps`, the number of consecutive steps that skipped
        decodes. The arguments are those of `decide`, after all rows are added.

        Pages are claimed row by row, so this is only known at the end. Without this check, the step
        could be empty.
        """
        if not self.num_steps or not _falls_short(candidates, num_prompt_tokens, max_prompts):
            return False
        self.num_steps = 0
        return True

    def _takes_good_part(self, decodes: Mapping[str, Request], num_tokens: int) -> bool:
        """Whether decodes would take at least 1/8 of a step with `num_tokens` prompt tokens."""
        max_tokens = self._state.config.max_num_batched_tokens
        if num_tokens + len(decodes) > max_tokens and len(decodes) >= _GOOD_PART * max_tokens:
            return True
        context = sum(request.num_computed for request in decodes.values())
        part = self._state.forecast.decode_part(len(decodes), context, min(num_tokens, max_tokens))
        return part >= _GOOD_PART

    def _num_prompt_tokens(self, prompts: Sequence[tuple[Request, int]]) -> int:
        """Number of uncached prompt tokens of running requests and, if there are free slots, of
        waiting requests."""
        num_tokens = sum(pending for _, pending in prompts)
        if self._admission.has_slots:
            num_tokens += self._state.queue.num_tokens - self._state.queue.num_expected_cached
        return num_tokens


def _falls_short(candidates: Deferrable, num_prompt_tokens: int, max_prompts: int) -> bool:
    """Whether a step has too few prompt tokens to skip decodes; always True if there are none."""
    return num_prompt_tokens < max(1, min(candidates.num_tokens, max_prompts))
