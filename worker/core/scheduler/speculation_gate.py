"""Speculation gate: limits drafts per request and step, so that throughput is never reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.core.draft_acceptance import (
    COMMON_ROWS,
    LONGEST_WAIT,
    BatchRecord,
    RequestRecord,
    size_class,
)
from worker.plan.plan import DraftRow, StepResult
from worker.protocol.messages import StepShape
from worker.protocol.speculation import Decision, SpeculationTotals
from worker.protocol.step_time import StepCosts

if TYPE_CHECKING:
    from worker.config import EngineConfig, SchedulingConfig, SpeculativeConfig
    from worker.core.request import Request
    from worker.core.scheduler.step import InFlightRow, StepInFlight

FIRST_RATE = 0.8
"""Prior of the acceptance rate, typical for prompt lookup in copied text."""
REFERENCE_STEPS = 48
"""Number of consecutive steps, per batch size, in which all rows have drafts, before one step
without drafts. Only such a step separates the cost of drafting from the cost of a row."""
PROBE_SHARE = 0.005
"""Fraction of the time of all steps that is available to probes. Unused time accumulates up to the
share of `LONGEST_WAIT` steps."""
MARGIN = 0.05
"""Margin by which a draft's expected benefit must exceed its cost (as a fraction), and the minimum
gain of a row in tokens. Drafts also take time outside the rank, and estimates are not exact."""
LONGEST_REST = 8
"""Maximum number of steps in which decisions are skipped after no request was selected to draft,
since decisions also take time."""


class SpeculationGate:
    """Decides on drafts based on acceptance per request and batch size, and on predicted costs.

    Whether a request drafts depends on the gain of its rows so far: accepted drafts minus the cost
    of the row, which has a fixed part and a part per draft (`StepCosts.draft_row`, `draft_token`).
    New requests are expected to gain as much as the average row, over all requests, in steps of
    this size. A request with a negative gain gets no drafts, except for occasional probes.

    The number of a request's drafts depends on the cost of one more draft, which is much smaller
    than the fixed part. A draft is worthwhile if its acceptance probability exceeds a threshold:
    the number of tokens that could be generated in the time that the draft takes, at the current
    throughput, including drafts. Proposers that know a probability for each draft receive the
    threshold with the Plan and stop drafting when it is reached. For other proposers, the
    acceptance rate p of the request limits the number: the j-th draft is accepted with probability
    p^j.

    The more compute-bound a batch is, the closer the threshold is to one, and the fewer drafts
    there are. Decisions depend only on the calls, not on clocks or random numbers.

    Args:
        config: the options of speculative decoding.
        scheduling: the engine's limits; `max_num_seqs` and `deadline_margin_ms` are used.
        stops_itself: whether the proposer stops at the threshold; otherwise the request's
            acceptance rate limits the number of drafts.
    """

    def __init__(
        self, config: SpeculativeConfig, scheduling: SchedulingConfig, *, stops_itself: bool
    ) -> None:
        self.config = config
        self._max_running = config.max_utilization * scheduling.max_num_seqs
        self._deadline_margin_s = scheduling.deadline_margin_ms / 1e3
        self.stops_itself = stops_itself
        self.totals = SpeculationTotals.of(config.num_speculative_tokens)
        self._rate = FIRST_RATE
        """Acceptance rate, over all requests."""
        self._batches: dict[int, BatchRecord] = {}
        """Statistics by `size_class` of the batch."""
        self._probe_s = 0.0
        """Time available to probes, in seconds."""
        self._costs: StepCosts | None = None
        """Coefficients of the step-time model; None until it can make predictions."""
        self._batch = BatchRecord()
        """Statistics for this step's batch size."""
        self._tokens_per_s = 0.0
        """Throughput of steps of this batch size."""
        self._threshold = 0.0
        """`Plan.draft_threshold` of this step."""
        self._closed: Decision | None = None
        """Reason why no request drafts in this step; None if some may."""
        self._now = 0.0
        self._step = 0
        """Number of this step."""
        self._num_decisions = self._num_allowed = 0
        """Number of requests considered in this step, and number of those that may draft."""
        self._rest = 1
        """Length of the next rest in steps (see LONGEST_REST)."""
        self._rest_until = 0
        """Step at which the current rest ends; 0 if there is none."""

    @property
    def is_open(self) -> bool:
        """Whether any request may draft in this step; if not, `num_drafts` must not be called."""
        return self._closed is None

    def begin_step(
        self, num_running: int, num_decodes: int, now: float, costs: StepCosts | None
    ) -> float:
        """Begins a step; returns its `Plan.draft_threshold`.

        Args:
            num_running: number of requests in the running set.
            num_decodes: number of those that are decoding.
            now: time on the scheduler's clock, in seconds.
            costs: coefficients of the step-time model; None until it can make predictions.
        """
        self._now = now
        self._end_step()
        self._step += 1
        self._costs = costs
        self._closed = None
        self._threshold = 0.0
        if self.config.adaptive:
            self._begin_size(num_decodes)
        if num_running >= self._max_running:
            self._closed = Decision.UTILIZATION
        if self._closed is not None:
            self.totals.count(self._closed, num_decodes)
        return self._threshold

    def _end_step(self) -> None:
        if self._num_decisions:
            self._rest = 1 if self._num_allowed else min(2 * self._rest, LONGEST_REST)
            self._rest_until = 0 if self._num_allowed else self._step + self._rest
        self._num_decisions = self._num_allowed = 0

    def _begin_size(self, num_decodes: int) -> None:
        batch = self._batch = self._batch_of(num_decodes)
        if self._costs is None or not num_decodes:
            self._closed = Decision.COST_UNKNOWN
            return
        self._tokens_per_s = batch.tokens_per_s(self._costs, num_decodes)
        self._threshold = (1.0 + MARGIN) * self._costs.draft_token * self._tokens_per_s
        if self._threshold >= 1.0:
            self._closed = Decision.COST
        elif self._step < self._rest_until and batch.gain.lower <= MARGIN:
            self._closed = Decision.ACCEPTANCE
        if batch.num_with_drafts >= REFERENCE_STEPS:
            batch.num_with_drafts = 0
            self._closed = Decision.COST_UNKNOWN

    def num_drafts(self, request: Request) -> int:
        """Maximum number of drafts for a decoding request in this step. Requires `is_open`."""
        assert self._closed is None, "drafting is disabled in this step"
        number, decision = self._decide(request)
        self._num_decisions += 1
        self._num_allowed += number > 0
        self.totals.count(decision)
        return number

    def observe(
        self, step: StepInFlight, result: StepResult, counts: Sequence[int], shape: StepShape
    ) -> None:
        """Records the result of a step before requests are updated with it.

        Args:
            step: the step as planned.
            result: result of the step.
            counts: number of the result's tokens for each row.
            shape: shape of the step.
        """
        if not shape.decode_rows:
            return
        num_decodes = step.shape.decode_rows
        num_tokens = sum(counts[:num_decodes])
        rows: list[_DraftedRow] = []
        if result.drafted is not None:
            num_tokens -= _drafted_rows(step.rows[:num_decodes], result, counts, rows)
        if not step.has_chunks:
            self.totals.num_decode_rows += shape.decode_rows
            self.totals.num_decode_tokens += num_tokens
        batch = self._batch_of(shape.decode_rows)
        every = shape.draft_rows == shape.decode_rows
        batch.num_with_drafts = batch.num_with_drafts + 1 if every else 0
        if self._costs is not None:
            seconds = self._costs.decodes(shape)
            self._probe_s += PROBE_SHARE * seconds - self._probe_s / LONGEST_WAIT
            batch.observe(num_tokens, seconds)
        for row in rows:
            self._observe_row(row, batch)
            if row.num_drafts:
                self.totals.add_row(row.num_drafts, row.num_accepted)

    def _observe_row(self, row: _DraftedRow, batch: BatchRecord) -> None:
        record, cost, start = self._record(row.request), 0.0, 0.0
        if self._costs is not None:
            rate = self._tokens_per_s
            draft_s = self._costs.draft_row + self._costs.draft_token * row.num_drafts
            cost = (1.0 + MARGIN) * rate * draft_s
            # The cost of a first row only matters for whether other requests start: for this one it
            # is sunk.
            start = self._start_s(record) * rate
            if record.is_trying:  # refund time that was not lost
                loss = max(0.0, cost + start - row.num_useful)
                self._probe_s += self._attempt_s(record) - loss / rate
        gain = row.num_useful - cost
        batch.gain.observe(gain - start, is_rare=record.is_trying)
        record.observe(row.num_drafts, row.num_accepted, gain, self._step)
        num_known = row.num_accepted + (row.num_accepted < row.num_drafts)
        if num_known:
            share = row.num_accepted / num_known
            self._rate += num_known / COMMON_ROWS * (share - self._rate)

    def _start_s(self, record: RequestRecord) -> float:
        return 0.0 if record.has_drafted or self._costs is None else self._costs.draft_start

    def _attempt_s(self, record: RequestRecord) -> float:
        """Time in seconds that drafting adds to a row, independent of the number of drafts."""
        return self._start_s(record) + (0.0 if self._costs is None else self._costs.draft_row)

    def _decide(self, request: Request) -> tuple[int, Decision]:
        config = self.config
        if request.priority > config.max_priority:
            return 0, Decision.PRIORITY
        if request.times.slo is not None and (
            0.0 <= request.due_s - self._now <= self._deadline_margin_s
        ):
            return 0, Decision.DEADLINE
        grammar = request.grammar
        if grammar is not None and (grammar.is_slow or not grammar.may_draft):
            return 0, Decision.GRAMMAR
        if not config.adaptive:
            return config.num_speculative_tokens, Decision.DRAFT
        record, common = self._record(request), self._batch.gain
        number = config.num_speculative_tokens
        if not self.stops_itself:
            number = _number_worth(record.rate, self._threshold, number)
        # Use the gain over all requests, unless this one differs significantly.
        gain = record.upper_gain if common.lower > MARGIN else record.lower_gain
        if number and gain > MARGIN:
            return number, Decision.DRAFT
        attempt_s = self._attempt_s(record)
        if record.is_due(self._step) and self._probe_s >= attempt_s:
            self._probe_s -= attempt_s
            record.try_again(max(self._rate, FIRST_RATE), common, self._step)
            return config.num_speculative_tokens, Decision.PROBE
        return 0, Decision.ACCEPTANCE

    def _record(self, request: Request) -> RequestRecord:
        record = request.speculation
        if record is None:
            record = request.speculation = RequestRecord(self._rate, self._batch.gain, self._step)
        return record

    def _batch_of(self, num_rows: int) -> BatchRecord:
        return self._batches.setdefault(size_class(num_rows), BatchRecord())


class _DraftedRow(NamedTuple):
    request: Request
    num_drafts: int
    num_accepted: int
    num_useful: int
    """Number of accepted drafts, excluding those after the end of the request."""


def _drafted_rows(
    planned: Sequence[InFlightRow],
    result: StepResult,
    counts: Sequence[int],
    rows: list[_DraftedRow],
) -> int:
    """Collects rows that were allowed to draft.

    Args:
        planned: rows of decoding requests, as planned.
        result: result of their step.
        counts: number of the result's tokens for each row.
        rows: receives an entry for each computed row that was allowed to draft.

    Returns:
        Number of tokens after the ends of requests.
    """
    num_drafted = iter(result.drafted or ())
    first = num_useless = 0
    for (row, request, _), count in zip(planned, counts, strict=False):
        tokens = result.token_ids[first : first + count]
        first += count
        if not isinstance(row, DraftRow):
            continue
        num_drafts, num_useful = next(num_drafted), _num_useful(request, tokens)
        num_useless += count - num_useful
        if row.num_drafts and count:
            rows.append(_DraftedRow(request, num_drafts, count - 1, num_useful - 1))
    return num_useless


def _num_useful(request: Request, tokens: Sequence[int]) -> int:
    """Number of tokens up to and including the first EOS or stop token; all tokens if there is
    none."""
    if len(tokens) > 1:
        for index, token in enumerate(tokens):
            if token in request.end_token_ids:
                return index + 1
    return len(tokens)


def _number_worth(rate: float, threshold: float, limit: int) -> int:
    """Maximum j, up to `limit`, for which rate^j is at least the threshold."""
    if rate < threshold or rate <= 0.0:
        return 0
    if rate >= 1.0 or threshold <= 0.0:
        return limit
    return min(limit, int(math.log(threshold) / math.log(rate)))


def create_gate(config: EngineConfig, *, on_cuda: bool) -> SpeculationGate | None:
    """Creates the configured gate; None if speculative decoding is disabled.

    Args:
        config: the engine configuration.
        on_cuda: whether the engine runs on CUDA, where prompt lookup does not stop at the
            threshold.
    """
    speculative = config.speculative
    if speculative is None:
        return None
    stops_itself = speculative.method == "draft" or not on_cuda
    return SpeculationGate(speculative, config.scheduling, stops_itself=stops_itself)
