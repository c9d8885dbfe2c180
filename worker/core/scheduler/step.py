"""A step: being put together, and in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.core.cache.host import Copies
from worker.core.cache.lease import Lease
from worker.core.request import Request
from worker.plan.plan import Admit, PageCopies, PageWrite, Plan, Row, StepResult
from worker.wire.messages import StepShape


class Share(NamedTuple):
    """One request's part of a step in flight."""

    request: Request
    lease: Lease
    """The lease it ran under: once the request holds another or none, its output is stale."""
    end: int
    """Positions computed when the step has completed."""
    sample: bool
    num_drafts: int = -1
    """Most drafts of a row that floats (see Row); -1 for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInFlight:
    """What the scheduler must remember of a Plan until its result is in."""

    seq: int
    shares: list[Share]
    """In the order of the Plan's rows."""
    num_tokens: int
    shape: StepShape
    has_chunks: bool
    """Whether any row is longer than one planned position."""
    num_loads: int = 0
    """Pages copied from host memory."""

    def counts(self, result: StepResult) -> list[int]:
        """How many of the result's tokens each share has.

        Raises:
            ValueError: the result has another number of tokens than were to be drawn.
        """
        if result.drawn is None:
            counts = [int(share.sample) for share in self.shares]
        else:
            drawn = iter(result.drawn)
            counts = [
                int(share.sample) if share.num_drafts < 0 else next(drawn) for share in self.shares
            ]
        if sum(counts) != len(result.token_ids):
            raise ValueError(
                f"step {self.seq} draws {sum(counts)} tokens, got {len(result.token_ids)}"
            )
        return counts

    def measured(self, result: StepResult) -> tuple[StepShape, float]:
        """What its average forward pass computed, and in how many milliseconds.

        Only running blocks take more than one; after the first, nothing else is computed. Rows
        that were planned ahead stood where their requests stand now.
        """
        num_passes = result.num_forwards
        if result.blocks is None or not num_passes:
            return self.shape, result.compute_ms
        first, first_attended = self.shape.prefill_tokens, self.shape.prefill_attended
        shares = [share for share in self.shares if share.sample]
        if shares and shares[0].num_drafts >= 0:
            shares = [share for share in shares if share.request.lease is share.lease]
            spans = [(share.request.num_computed, share.request.num_wanted) for share in shares]
            first = sum(end - start for start, end in spans)
            first_attended = sum(_attended(start, end - start) for start, end in spans)
        else:
            spans = [(0, share.end) for share in shares]
        sizes = [share.request.block_size for share in shares]
        attended = sum(size * end for size, (_, end) in zip(sizes, spans, strict=True))
        shape = StepShape(
            seq=self.seq,
            prefill_tokens=(first + (num_passes - 1) * sum(sizes)) // num_passes,
            prefill_attended=(first_attended + (num_passes - 1) * attended) // num_passes,
        )
        return shape, result.compute_ms / num_passes

    def masks(self, drafts: Sequence[Sequence[int]]) -> bytes:
        """Masks for the Plan's masked draws, once the results of all earlier steps are applied.

        The draw of a request that has ended or was taken back meanwhile is dropped anyway, and
        takes whatever mask it had last.

        Args:
            drafts: of each masked row, where any of them may have drafts.
        """
        masked = [
            (share, share.request.grammar)
            for share in self.shares
            if share.sample and share.request.grammar is not None
        ]
        masks: list[bytes] = []
        for number, (share, grammar) in enumerate(masked):
            ahead = drafts[number] if drafts else ()
            if ahead and share.request.lease is share.lease:
                masks += grammar.walk(ahead)
            else:
                masks += [grammar.mask] * (1 + len(ahead))
        return b"".join(masks)


class StepBuilder:
    """Collects rows, and what the device's tables need before them.

    Args:
        seq: number of the step.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.draft_threshold = 0.0
        """See Plan."""
        self.num_tokens = 0
        self._any_masked = False
        self._num_attended = 0
        self._num_context = 0
        self._admits: list[Admit] = []
        self._page_writes: list[PageWrite] = []
        self._single_rows: list[Row] = []
        self._single_shares: list[Share] = []
        self._num_floating = 0
        """Tokens of rows that float, at most."""
        self._floating_rows: list[Row] = []
        self._floating_shares: list[Share] = []
        self._chunk_rows: list[Row] = []
        self._chunk_shares: list[Share] = []
        self.max_rounds = 1
        """See Plan."""
        self._stores: PageCopies | None = None
        self._loads: PageCopies | None = None

    @property
    def has_rows_without_draws(self) -> bool:
        """Whether a row computes part of what is known, and no more."""
        return any(not share.sample for share in self._shares())

    def has_row_of(self, request: Request) -> bool:
        """Whether the step computes anything for a request."""
        return any(share.request is request for share in self._shares())

    def admit(self, admit: Admit) -> None:
        """Fills the row of a slot before the step."""
        self._admits.append(admit)

    def write_pages(self, slot: int, start: int, page_ids: list[int]) -> None:
        """Extends the page-table row of a slot before the step."""
        self._page_writes.append(PageWrite(slot, start, page_ids))

    def copy_pages(self, stores: Copies, loads: Copies) -> None:
        """Moves pages to host memory and back before the step."""
        self._stores = _page_copies(stores)
        self._loads = _page_copies(loads)

    def add_row(self, request: Request, lease: Lease, length: int) -> None:
        """Computes the next `length` positions of a request, and counts them as computed.

        A row that reaches the last token, known or still being drawn, draws the next one.
        """
        start = request.num_computed
        end = start + length
        sample = end == request.num_wanted
        request.num_computed = end
        if sample:
            request.num_placeholders += request.block_size == 1
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
            self._num_attended += _attended(start, length)

    def add_floating(self, request: Request, lease: Lease, end: int, num_drafts: int) -> None:
        """Computes a decoding request's newest token and up to `num_drafts` drafts after it.

        Its place may depend on the steps in flight; no position from `end` on is computed.
        """
        start = request.num_computed
        assert start < end, "its row has no room"
        request.num_computed += 1
        request.num_placeholders += 1
        request.num_unsettled += num_drafts
        self._any_masked |= request.grammar is not None
        lease.fence = self.seq
        self.num_tokens += 1 + num_drafts
        self._num_floating += 1 + num_drafts
        self._num_context += (1 + num_drafts) * (start + 1)
        self._floating_rows.append(Row(lease.slot, start, end - start, True, num_drafts))
        self._floating_shares.append(Share(request, lease, end, True, num_drafts))

    def add_block_ahead(self, request: Request, lease: Lease, start: int, end: int) -> None:
        """Computes a request's running block once more, or the next one, within [start, end).

        Which of them the step in flight decides, and whether any; its result is to come first.
        """
        lease.fence = self.seq
        self.num_tokens += end - start
        self._floating_rows.append(Row(lease.slot, start, end - start, True, end - start - 1))
        self._floating_shares.append(Share(request, lease, end, True, end - start - 1))

    def plan(self, digest_seq: int, digest: int) -> Plan:
        """The finished Plan: rows of length 1 first, those that float next."""
        masked: list[int] = []
        if self._any_masked:
            shares = self._shares()
            grammars = [share.request.grammar for share in shares if share.sample]
            masked = [draw for draw, grammar in enumerate(grammars) if grammar is not None]
        return Plan(
            seq=self.seq,
            admits=self._admits,
            page_writes=self._page_writes,
            rows=self._single_rows + self._floating_rows + self._chunk_rows,
            digest_seq=digest_seq,
            digest=digest,
            masked=masked,
            draft_threshold=self.draft_threshold,
            max_rounds=self.max_rounds,
            stores=self._stores,
            loads=self._loads,
        )

    def in_flight(self) -> StepInFlight:
        """What to remember until the result is in."""
        # A draft costs what a row does.
        num_decodes = len(self._single_rows) + self._num_floating
        return StepInFlight(
            seq=self.seq,
            shares=self._shares(),
            num_tokens=self.num_tokens,
            shape=StepShape(
                seq=self.seq,
                prefill_tokens=self.num_tokens - num_decodes,
                prefill_attended=self._num_attended,
                decode_rows=num_decodes,
                decode_context=self._num_context,
            ),
            has_chunks=bool(self._chunk_rows),
            num_loads=0 if self._loads is None else len(self._loads.pages),
        )

    def _shares(self) -> list[Share]:
        return self._single_shares + self._floating_shares + self._chunk_shares


def _attended(start: int, length: int) -> int:
    """Pairs of positions that a causal row of so many attends to."""
    return length * start + length * (length + 1) // 2


def _page_copies(copies: Copies) -> PageCopies | None:
    return PageCopies(list(copies.pages), list(copies.slots)) if copies.pages else None
