"""Decides how many drafts each request gets in each step, so that speculation never loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.speculative.acceptance import RequestRecord
from worker.speculative.config import GateConfig
from worker.speculative.costs import LookCosts, StepCosts
from worker.wire.speculation import Decision, SpeculationTotals

if TYPE_CHECKING:
    from worker.engine.config import EngineConfig
    from worker.request import Request
    from worker.scheduler.plan import StepResult
    from worker.scheduler.step import StepInFlight

_FIRST_GAIN, _GAIN_STEP = 0.5, 0.02
"""Where the gain per row starts, and the weight of the newest row in it."""
_PROBE_SHARE, _MOST_PROBE_MS = 0.005, 2.0
"""Share of all steps' time that attempts may take, and how much of it is kept for later."""
_MARGIN = 1.1
"""A draft must promise so many times its cost: the estimates are not exact."""
_HOPELESS = 0.95
"""From this threshold on no draft can gain, and none is tried."""


class SpeculationGate:
    """Follows acceptance by request and the cost of drafts by batch size.

    A draft is worth its cost while the probability that it counts exceeds the threshold: the tokens
    that steps yield in the time that verifying it takes. As a batch grows bound by arithmetic the
    threshold grows towards one, and drafts get fewer and cease.

    The gate knows by which rate a request's drafts are accepted, p: the j-th counts with p^j. That
    bounds their number; a request that gets none tries one from time to time. Proposers, which know
    how good each single guess is, get the threshold with the Plan and draft less where less is
    worth it.

    Decisions follow from what it was told alone: no clock, no chance.
    """

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.totals = SpeculationTotals.of(config.num_speculative_tokens)
        self._costs = StepCosts()
        self._looks = LookCosts()
        """Rank 0's time per row that may draft; with a draft model, per guess."""
        self._look_ms = 0.0
        """The same in this step."""
        self._gain = _FIRST_GAIN
        """Tokens that a row of any request gains where it may draft."""
        self._probe_ms = 0.0
        """Time that may be spent on attempts without much hope."""
        self._tokens_per_ms = 0.0
        """Of steps as they were lately; 0 where unknown."""
        self._utilization = 0.0
        self._now = 0.0
        self._threshold: float | None = None
        self._look_cost = 0.0
        """The same in tokens, in this step."""

    def begin(self, num_running: int, num_decodes: int, now: float) -> float:
        """Begins a step; returns its `Plan.draft_threshold`.

        Args:
            num_running: requests in the running set.
            num_decodes: those of them that decode.
            now: by the scheduler's clock.
        """
        self._now = now
        self._utilization = num_running / self.config.max_num_seqs
        if not self.config.adaptive:
            return 0.0
        rates = self._costs.rates(num_decodes)
        if rates is None:
            self._threshold = None
            return 0.0
        draft_ms, tokens_per_ms = rates
        self._tokens_per_ms = tokens_per_ms
        self._look_ms = self._looks.value(num_decodes)
        self._threshold = _MARGIN * draft_ms * tokens_per_ms
        self._look_cost = _MARGIN * self._look_ms * tokens_per_ms
        if self.config.has_draft_model:
            self._threshold += self._look_cost
            self._look_cost = 0.0
        return self._threshold

    def num_drafts(self, request: Request) -> int:
        """Most drafts for a decoding request in this step; 0 for a plain row."""
        number, decision = self._decide(request)
        self.totals.count(decision)
        return number

    def observe(self, step: StepInFlight, result: StepResult) -> None:
        """Takes the result of a step, before its tokens are."""
        drafted, drawn = result.drafted or [], result.drawn or []
        looking = [share for share in step.shares if share.num_drafts >= 0]
        threshold = self._threshold or 0.0
        rows = [
            _DraftedRow(self._record(share.request), share.num_drafts, num_drafts, num_drawn - 1)
            for share, num_drafts, num_drawn in zip(looking, drafted, drawn, strict=True)
            if share.num_drafts and num_drawn
        ]
        start_cost = self._observe_looks(rows, len(step.shares), result.draft_ms)
        for row in rows:
            cost = threshold * self._num_guesses(row)
            # What a first look cost tells whether others should begin; it is paid in any case.
            start = 0.0 if row.record.has_looked else start_cost
            row.record.observe(row.num_drafts, row.num_accepted, cost)
            self._gain += _GAIN_STEP * (row.num_accepted - cost - start - self._gain)
            if row.num_drafts:
                self.totals.add_row(row.num_drafts, row.num_accepted)
        self._probe_ms = min(self._probe_ms + _PROBE_SHARE * result.compute_ms, _MOST_PROBE_MS)
        if not step.has_chunks:
            num_tokens = len(result.token_ids)
            self.totals.num_decode_rows += len(step.shares)
            self.totals.num_decode_tokens += num_tokens
            step_ms = result.compute_ms - result.draft_ms
            self._costs.observe(
                *(len(step.shares), sum(drafted), num_tokens, step_ms, result.draft_ms)
            )

    def _observe_looks(self, rows: Sequence[_DraftedRow], num_rows: int, draft_ms: float) -> float:
        """Takes the time of looking; returns what each request's first look cost, in tokens.

        A draft model computes all that a request has so far before its first draft.
        """
        num_looks = sum(map(self._num_guesses, rows)) if self.config.has_draft_model else len(rows)
        num_new = sum(not row.record.has_looked for row in rows)
        if not num_looks:
            return 0.0
        if not self.config.has_draft_model or not num_new:
            self._looks.observe(num_rows, num_looks, draft_ms)
            return 0.0
        start_ms = max(0.0, draft_ms - num_looks * self._looks.value(num_rows))
        return start_ms / num_new * self._tokens_per_ms

    def _num_guesses(self, row: _DraftedRow) -> int:
        """A draft model guessed once more where it found that guess not worth verifying."""
        if self.config.has_draft_model:
            return min(row.num_drafts + 1, row.most)
        return row.num_drafts

    def _decide(self, request: Request) -> tuple[int, Decision]:
        config = self.config
        if request.priority > config.max_priority:
            return 0, Decision.PRIORITY
        if self._utilization >= config.max_utilization:
            return 0, Decision.UTILIZATION
        if request.slo is not None and (
            0.0 <= request.due_s - self._now <= config.deadline_margin_s
        ):
            return 0, Decision.DEADLINE
        grammar = request.grammar
        if grammar is not None and (grammar.is_slow or not grammar.may_draft):
            return 0, Decision.GRAMMAR
        if not config.adaptive:
            return config.num_speculative_tokens, Decision.DRAFT
        if self._threshold is None:
            return 0, Decision.COST_UNKNOWN
        if self._threshold >= _HOPELESS:
            return 0, Decision.COST
        record = self._record(request)
        number = 0
        if record.gain >= self._look_cost:
            number = _number_worth(record.rate, self._threshold, config.num_speculative_tokens)
        if number:
            return number, Decision.DRAFT
        if record.is_due() and self._probe_ms >= self._look_ms:
            self._probe_ms -= self._look_ms
            record.try_again(self._gain)
            return config.num_speculative_tokens, Decision.PROBE
        return 0, Decision.ACCEPTANCE

    def _record(self, request: Request) -> RequestRecord:
        record = request.speculation
        if record is None:
            record = request.speculation = RequestRecord(self._gain)
        return record


class _DraftedRow(NamedTuple):
    record: RequestRecord
    most: int
    """Drafts that it was allowed."""
    num_drafts: int
    num_accepted: int


def _number_worth(rate: float, threshold: float, most: int) -> int:
    """The largest j, at most `most`, for which rate^j is at least the threshold."""
    if rate < threshold or rate <= 0.0:
        return 0
    if rate >= 1.0 or threshold <= 0.0:
        return most
    return min(most, int(math.log(threshold) / math.log(rate)))


def create_gate(config: EngineConfig) -> SpeculationGate | None:
    """The gate that the configuration asks for; None where nothing is drafted."""
    if config.speculative_method == "none":
        return None
    return SpeculationGate(
        GateConfig(
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_seqs=config.max_num_seqs,
            max_utilization=config.speculative_max_utilization,
            max_priority=config.speculative_max_priority,
            deadline_margin_s=config.speculative_deadline_margin_ms / 1e3,
            has_draft_model=config.speculative_method == "draft",
            adaptive=config.speculative_adaptive,
        )
    )
