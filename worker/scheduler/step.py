"""A step: being put together, and in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from worker.cache.lease import Lease
from worker.request import Request
from worker.scheduler.plan import Admit, PageWrite, Plan, Row
from worker.wire.messages import StepShape


class Share(NamedTuple):
    """One request's part of a step in flight."""

    request: Request
    lease: Lease
    """The lease it ran under: once the request holds another or none, its output is stale."""
    end: int
    """Positions computed when the step has completed."""
    sample: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInFlight:
    """What the scheduler must remember of a Plan until its result is in."""

    seq: int
    shares: list[Share]
    """In the order of the Plan's rows."""
    num_tokens: int
    shape: StepShape

    def masks(self) -> bytes:
        """Masks for the Plan's masked draws, once the results of all earlier steps are applied.

        The draw of a request that has ended or was taken back meanwhile is dropped anyway, and
        takes whatever mask it had last.
        """
        grammars = (share.request.grammar for share in self.shares if share.sample)
        return b"".join(grammar.mask for grammar in grammars if grammar is not None)


class StepBuilder:
    """Collects rows, and what the device's tables need before them.

    Args:
        seq: number of the step.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.num_tokens = 0
        self._any_masked = False
        self._num_attended = 0
        self._num_context = 0
        self._admits: list[Admit] = []
        self._page_writes: list[PageWrite] = []
        self._single_rows: list[Row] = []
        self._single_shares: list[Share] = []
        self._chunk_rows: list[Row] = []
        self._chunk_shares: list[Share] = []
        self.max_rounds = 1
        """See Plan."""

    @property
    def has_rows_without_draws(self) -> bool:
        """Whether a row computes part of what is known, and no more."""
        return any(not share.sample for share in (*self._single_shares, *self._chunk_shares))

    def has_row_of(self, request: Request) -> bool:
        """Whether the step computes anything for a request."""
        return any(
            share.request is request for share in (*self._single_shares, *self._chunk_shares)
        )

    def admit(self, admit: Admit) -> None:
        """Fills the row of a slot before the step."""
        self._admits.append(admit)

    def write_pages(self, slot: int, start: int, page_ids: list[int]) -> None:
        """Extends the page-table row of a slot before the step."""
        self._page_writes.append(PageWrite(slot, start, page_ids))

    def add_row(self, request: Request, lease: Lease, length: int) -> None:
        """Computes the next `length` positions of a request, and counts them as computed.

        A row that reaches the last token, known or still being drawn, draws the next one.
        """
        start = request.num_computed
        end = start + length
        sample = end == request.num_wanted
        request.num_computed = end
        if sample and request.block_size == 1:
            request.num_placeholders += 1
            self._any_masked |= request.grammar is not None
        lease.fence = self.seq
        self.num_tokens += length
        row = Row(lease.slot, start, length, sample)
        share = Share(request, lease, end, sample)
        if length == 1:
            self._single_rows.append(row)
            self._single_shares.append(share)
            self._num_context += end
        else:
            self._chunk_rows.append(row)
            self._chunk_shares.append(share)
            self._num_attended += length * start + length * (length + 1) // 2

    def plan(self, digest_seq: int, digest: int) -> Plan:
        """The finished Plan: rows of length 1 first."""
        masked: list[int] = []
        if self._any_masked:
            shares = self._single_shares + self._chunk_shares
            grammars = [share.request.grammar for share in shares if share.sample]
            masked = [draw for draw, grammar in enumerate(grammars) if grammar is not None]
        return Plan(
            seq=self.seq,
            admits=self._admits,
            page_writes=self._page_writes,
            rows=self._single_rows + self._chunk_rows,
            digest_seq=digest_seq,
            digest=digest,
            masked=masked,
            max_rounds=self.max_rounds,
        )

    def in_flight(self) -> StepInFlight:
        """What to remember until the result is in."""
        return StepInFlight(
            seq=self.seq,
            shares=self._single_shares + self._chunk_shares,
            num_tokens=self.num_tokens,
            shape=StepShape(
                seq=self.seq,
                prefill_tokens=self.num_tokens - len(self._single_rows),
                prefill_attended=self._num_attended,
                decode_rows=len(self._single_rows),
                decode_context=self._num_context,
            ),
        )
