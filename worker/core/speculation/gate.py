"""Decides how many drafts each request gets in each step, so that speculation never loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.core.speculation.acceptance import CommonGain, RequestRecord
from worker.core.speculation.config import GateConfig
from worker.core.speculation.costs import DraftingTimes, Rates, StepCost, StepCosts, size_class
from worker.plan.plan import DraftRow, StepResult
from worker.wire.speculation import Decision, SpeculationTotals

if TYPE_CHECKING:
    from worker.config import EngineConfig
    from worker.core.request import Request
    from worker.core.scheduler.step import StepInFlight

_FIRST_RATE = 0.8
"""Where the rate of acceptance starts."""
_RATE_STEP = 0.02
"""Weight of the newest draft in it."""
_REFERENCE = 48
"""Steps of a size with drafts in all rows, after which one goes without."""
_PROBE_SHARE, _MOST_PROBE_MS = 0.005, 2.0
"""Share of all steps' time that attempts may take, and how much of it is kept for later."""
_MARGIN = 1.05
"""A draft must promise so many times its cost: the estimates are not exact."""
_LEAST_GAIN = 0.05
"""Tokens that a row must gain: the rank's time is not all that drafts take."""
_HOPELESS = 0.9
"""From this threshold on no draft can gain, and none is tried."""
_LONGEST_REST = 8
"""Steps in which nobody is asked, where nobody drafted when all were: to ask takes time as well."""


class SpeculationGate:
    """Follows acceptance by request and the cost of drafts by batch size.

    Two questions are apart. Whether a request drafts at all follows from what its rows gained, each
    the drafts that were accepted less what it cost, fixed part and drafts (see `StepCosts`). A new
    one's are expected to gain what rows of all requests do in steps of this size. One that loses
    gets none, and tries from time to time.

    How many drafts follows from what one more costs, and that is much less: it is worth this while
    the probability that it counts exceeds the threshold, the tokens that steps yield in the time
    that it takes. Steps as they are, with drafts: that rate is what another use of the time would
    bring. Proposers, which know how likely each single guess is, get the threshold with the Plan
    and draft until it. Where a proposer does not, the rate p by which the request's drafts are
    accepted bounds their number: the j-th counts with p^j.

    As a batch grows bound by arithmetic the threshold grows towards one, and drafts get fewer and
    cease. Decisions follow from what the gate was told alone: no clock, no chance.
    """

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.totals = SpeculationTotals.of(config.num_speculative_tokens)
        self._costs = StepCosts()
        self._times = DraftingTimes()
        self._rate = _FIRST_RATE
        """How likely any request's draft is accepted."""
        self._gains: dict[int, CommonGain] = {}
        """By size of batch."""
        self._without_plain: dict[int, int] = {}
        """By size of batch: steps since one that had no row with drafts at least."""
        self._probe_ms = 0.0
        """Time that may be spent on attempts without much hope."""
        self._rates: Rates | None = None
        """Of steps as they are now."""
        self._threshold = 0.0
        self._common = CommonGain()
        """Of the size of this step."""
        self._closed: Decision | None = None
        """Why nothing is drafted in this step, whatever the request."""
        self._now = 0.0
        self._step = 0
        """Number of this one."""
        self._num_asked = self._num_let = 0
        """In this step: requests that were asked about, and those of them that may draft."""
        self._rest = 1
        self._rest_until = 0

    @property
    def is_open(self) -> bool:
        """Whether any request may draft in this step; else nobody need ask."""
        return self._closed is None

    def begin(self, num_running: int, num_decodes: int, now: float) -> float:
        """Begins a step; returns its `Plan.draft_threshold`.

        Args:
            num_running: requests in the running set.
            num_decodes: those of them that decode.
            now: by the scheduler's clock.
        """
        self._now = now
        self._end_step()
        self._step += 1
        self._common = self._gain(num_decodes)
        self._closed = None
        self._threshold = 0.0
        if self.config.adaptive:
            self._begin_size(num_decodes)
        if num_running >= self.config.max_utilization * self.config.max_num_seqs:
            self._closed = Decision.UTILIZATION
        if self._closed is not None:
            self.totals.count(self._closed, num_decodes)
        return self._threshold

    def _end_step(self) -> None:
        if self._num_asked:
            self._rest = 1 if self._num_let else min(2 * self._rest, _LONGEST_REST)
            self._rest_until = 0 if self._num_let else self._step + self._rest
        self._num_asked = self._num_let = 0

    def _begin_size(self, num_decodes: int) -> None:
        self._rates = self._costs.rates(num_decodes)
        if self._rates is None:
            self._closed = Decision.COST_UNKNOWN
            return
        self._threshold = _MARGIN * self._rates.draft_ms * self._rates.tokens_per_ms
        if self._threshold >= _HOPELESS:
            self._closed = Decision.COST
        elif self._step < self._rest_until and self._common.sure <= _LEAST_GAIN:
            self._closed = Decision.ACCEPTANCE
        size = size_class(num_decodes)
        if self._without_plain.get(size, 0) >= _REFERENCE:
            self._without_plain[size] = 0
            self._closed = Decision.COST_UNKNOWN

    def num_drafts(self, request: Request) -> int:
        """Most drafts for a decoding request in this step, which is open; 0 for a plain row."""
        assert self._closed is None, "nobody drafts in this step"
        number, decision = self._decide(request)
        self._num_asked += 1
        self._num_let += number > 0
        self.totals.count(decision)
        return number

    def observe(self, step: StepInFlight, result: StepResult) -> None:
        """Takes the result of a step, before its tokens are."""
        self._probe_ms = min(self._probe_ms + _PROBE_SHARE * result.compute_ms, _MOST_PROBE_MS)
        if result.drawn is None and step.shape.decode_rows:
            self._observe_plain(step, result)
        elif result.drawn is not None:
            self._observe_speculative(step, result)

    def _observe_plain(self, step: StepInFlight, result: StepResult) -> None:
        num_rows = step.shape.decode_rows
        self._without_plain[size_class(num_rows)] = 0
        if not step.has_chunks:
            self.totals.num_decode_rows += num_rows
            self.totals.num_decode_tokens += len(result.token_ids)
        if not self._costs.skips(num_rows):
            num_tokens = sum(one.row.num_draws for one in step.rows[:num_rows])
            prompts = step.shape.prefill_tokens
            self._costs.observe(StepCost(num_rows, 0, 0, prompts, num_tokens, result.compute_ms))

    def _observe_speculative(self, step: StepInFlight, result: StepResult) -> None:
        speculative = [(one.row, one.request) for one in step.rows if isinstance(one.row, DraftRow)]
        num_single = step.shape.decode_rows - sum(row.num_draws for row, _ in speculative)
        num_tokens = first = sum(one.row.num_draws for one in step.rows[:num_single])
        rows: list[_DraftedRow] = []
        drafted, drawn = result.drafted or [], result.drawn or []
        for (row, request), num_drafts, num_drawn in zip(speculative, drafted, drawn, strict=True):
            tokens = result.token_ids[first : first + num_drawn]
            first += num_drawn
            num_useful = _num_useful(request, tokens)
            num_tokens += num_useful
            if row.num_drafts and num_drawn:
                record = self._record(request)
                rows.append(_DraftedRow(record, num_drafts, num_drawn - 1, num_useful - 1))
        # Behind the end of a request nothing is computed.
        num_rows = num_single + len(speculative) - drawn.count(0)
        if num_rows:
            self._observe_costs(step, result, num_rows, num_tokens, rows)
        for drafted_row in rows:
            self._observe_row(drafted_row, num_rows)
            if drafted_row.num_drafts:
                self.totals.add_row(drafted_row.num_drafts, drafted_row.num_accepted)

    def _observe_costs(
        self,
        step: StepInFlight,
        result: StepResult,
        num_rows: int,
        num_tokens: int,
        rows: Sequence[_DraftedRow],
    ) -> None:
        num_new = sum(not row.record.has_looked for row in rows)
        if rows:
            self._times.observe(num_rows, len(rows), num_new, result.draft_ms)
        self._costs.observe(
            StepCost(
                num_rows=num_rows,
                num_looks=len(rows),
                num_drafts=sum(row.num_drafts for row in rows),
                num_prompts=step.shape.prefill_tokens,
                num_tokens=num_tokens,
                elapsed_ms=max(0.0, result.compute_ms - num_new * self._times.start_ms),
            )
        )
        size = size_class(num_rows)
        counted = self._without_plain.get(size, 0)
        self._without_plain[size] = counted + 1 if len(rows) == num_rows else 0
        if not step.has_chunks:
            self.totals.num_decode_rows += num_rows
            self.totals.num_decode_tokens += num_tokens

    def _observe_row(self, row: _DraftedRow, num_rows: int) -> None:
        record, cost, start = row.record, 0.0, 0.0
        if self._rates is not None:
            look_ms, draft_ms, tokens_per_ms = self._rates
            cost = _MARGIN * tokens_per_ms * (look_ms + draft_ms * row.num_drafts)
            # What a first look cost tells whether others should begin; it is paid in any case.
            start = self._start_ms(record) * tokens_per_ms
            if record.is_trying:  # what it gained takes no time
                loss = max(0.0, cost + start - row.num_useful)
                self._probe_ms += look_ms + self._start_ms(record) - loss / tokens_per_ms
        self._gain(num_rows).observe(row.num_useful - cost - start, is_rare=record.is_trying)
        gain = row.num_useful - cost
        record.observe(row.num_drafts, row.num_accepted, gain, self._step)
        num_known = row.num_accepted + (row.num_accepted < row.num_drafts)
        if num_known:
            share = row.num_accepted / num_known
            self._rate += _RATE_STEP * num_known * (share - self._rate)

    def _start_ms(self, record: RequestRecord) -> float:
        return 0.0 if record.has_looked else self._times.start_ms

    def _decide(self, request: Request) -> tuple[int, Decision]:
        config = self.config
        if request.priority > config.max_priority:
            return 0, Decision.PRIORITY
        if request.times.slo is not None and (
            0.0 <= request.due_s - self._now <= config.deadline_margin_s
        ):
            return 0, Decision.DEADLINE
        grammar = request.grammar
        if grammar is not None and (grammar.is_slow or not grammar.may_draft):
            return 0, Decision.GRAMMAR
        if not config.adaptive:
            return config.num_speculative_tokens, Decision.DRAFT
        assert self._rates is not None, "then nothing is drafted"
        record, common = self._record(request), self._common
        number = config.num_speculative_tokens
        if not config.stops_itself:
            number = _number_worth(record.rate, self._threshold, number)
        # What rows of all requests do counts, unless this one differs by more than chance.
        gain = record.most_gain if common.sure > _LEAST_GAIN else record.sure_gain
        if number and gain > _LEAST_GAIN:
            return number, Decision.DRAFT
        if record.is_due(self._step):
            probe_ms = self._rates.look_ms + self._start_ms(record)
            if self._probe_ms >= probe_ms:
                self._probe_ms -= probe_ms
                record.try_again(max(self._rate, _FIRST_RATE), common, self._step)
                return config.num_speculative_tokens, Decision.PROBE
        return 0, Decision.ACCEPTANCE

    def _record(self, request: Request) -> RequestRecord:
        record = request.speculation
        if record is None:
            record = request.speculation = RequestRecord(self._rate, self._common, self._step)
        return record

    def _gain(self, num_rows: int) -> CommonGain:
        return self._gains.setdefault(size_class(num_rows), CommonGain())


class _DraftedRow(NamedTuple):
    record: RequestRecord
    num_drafts: int
    num_accepted: int
    num_useful: int
    """Of these: those before the end of the request."""


def _num_useful(request: Request, tokens: Sequence[int]) -> int:
    """How many tokens come up to the end of the request."""
    if len(tokens) > 1:
        for place, token in enumerate(tokens):
            if token in request.end_token_ids:
                return place + 1
    return len(tokens)


def _number_worth(rate: float, threshold: float, most: int) -> int:
    """The largest j, at most `most`, for which rate^j is at least the threshold."""
    if rate < threshold or rate <= 0.0:
        return 0
    if rate >= 1.0 or threshold <= 0.0:
        return most
    return min(most, int(math.log(threshold) / math.log(rate)))


def create_gate(config: EngineConfig, *, on_cuda: bool) -> SpeculationGate | None:
    """The gate that the configuration asks for; None where nothing is drafted.

    Args:
        config: of the engine.
        on_cuda: it runs on CUDA devices, where prompt lookup drafts as much as it may.
    """
    if config.speculative_method == "none":
        return None
    return SpeculationGate(
        GateConfig(
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_seqs=config.max_num_seqs,
            max_utilization=config.speculative_max_utilization,
            max_priority=config.speculative_max_priority,
            deadline_margin_s=config.deadline_margin_ms / 1e3,
            stops_itself=config.speculative_method == "draft" or not on_cuda,
            adaptive=config.speculative_adaptive,
        )
    )
