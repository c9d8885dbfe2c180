"""Steps of the scheduler: under construction (StepBuilder) and in flight (StepInFlight)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from worker.core.adapters import AdapterPool
from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.plan.plan import (
    Accept,
    AdapterLoad,
    AdapterRead,
    Admit,
    BlockRow,
    DraftRow,
    PageCopies,
    PageWrite,
    Plan,
    PlannedRow,
    Row,
    StateLoad,
    StateStore,
    StepResult,
)
from worker.protocol.messages import StepShape


class InFlightRow(NamedTuple):
    """A row of a step in flight, with its request and lease."""

    row: Row
    request: Request
    lease: Lease
    """Lease of the request when the row was planned; the row's output is stale if the request no
    longer has this lease."""

    @property
    def is_stale(self) -> bool:
        """Whether the row's request has ended or was preempted in the meantime."""
        return self.request.lease is not self.lease


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInFlight:
    """A launched step, with the data that the scheduler needs to apply its result."""

    seq: int
    rows: list[InFlightRow]
    """Rows in the order of the Plan."""
    num_tokens: int
    shape: StepShape
    has_chunks: bool
    """Whether any row computes a chunk of a prompt, or a block."""
    masked: Sequence[int] = ()
    """Indices of the masked rows among those that sample, as in the Plan."""
    num_loads: int = 0
    """Number of pages that the Plan copies from host memory; a state counts as several pages."""

    def measured(self, result: StepResult) -> tuple[StepShape, float]:
        """Shape of the average forward pass of a step with drafts or running blocks, and its
        duration in milliseconds.

        Only running blocks take more than one pass, and the later passes compute nothing else. Must
        be called before the result is applied to the requests: it reads the positions of their
        blocks.
        """
        num_passes = result.num_forwards
        if result.drafted is not None:
            return self._drafted_shape(result.drafted, result.num_sampled or []), result.compute_ms
        if result.blocks is None or not num_passes:
            return self.shape, result.compute_ms
        first, first_attended = self.shape.prefill_tokens, self.shape.prefill_attended
        blocks = [
            (planned, planned.row) for planned in self.rows if isinstance(planned.row, BlockRow)
        ]
        if blocks and blocks[0][1].is_window:
            blocks = [(planned, row) for planned, row in blocks if not planned.is_stale]
            spans = [
                (planned.request.num_computed, planned.request.num_to_compute)
                for planned, _ in blocks
            ]
            first = sum(end - start for start, end in spans)
            first_attended = sum(_attended(start, end - start) for start, end in spans)
        else:
            spans = [(0, row.start + row.length) for _, row in blocks]
        sizes = [planned.request.block_size for planned, _ in blocks]
        attended = sum(size * end for size, (_, end) in zip(sizes, spans, strict=True))
        shape = StepShape(
            seq=self.seq,
            prefill_tokens=(first + (num_passes - 1) * sum(sizes)) // num_passes,
            prefill_attended=(first_attended + (num_passes - 1) * attended) // num_passes,
        )
        return shape, result.compute_ms / num_passes

    def _drafted_shape(self, drafted: Sequence[int], num_sampled: Sequence[int]) -> StepShape:
        """Shape of a step with draft rows as it was computed: without rows past the end of a
        request, and with the number of drafts that the proposer returned."""
        rows = [planned for planned in self.rows if isinstance(planned.row, DraftRow)]
        ran = [planned for planned, count in zip(rows, num_sampled, strict=True) if count]
        records = [planned.request.speculation for planned in ran if planned.row.num_samples > 1]
        return msgspec.structs.replace(
            self.shape,
            decode_rows=self.shape.decode_rows - len(rows) + len(ran),
            draft_rows=len(records),
            draft_tokens=sum(drafted),
            draft_starts=sum(record is None or not record.has_drafted for record in records),
        )

    def masked_rows(self) -> list[tuple[str, int] | None]:
        """Requests of the Plan's masked rows, by id and attempt; None for stale rows, and for
        requests that switched to free text."""
        sampling = [planned for planned in self.rows if planned.row.num_samples]
        return [
            None
            if planned.is_stale or planned.request.grammar is None
            else (planned.request.request_id, planned.request.attempt)
            for planned in (sampling[number] for number in self.masked)
        ]


class StepBuilder:
    """Builds the Plan of one step: rows, and the table updates that precede them.

    Args:
        seq: number of the step.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.draft_threshold = 0.0
        """Minimum acceptance probability at which a draft is worth its cost, as in `Plan`."""
        self.num_tokens = 0
        self._any_masked = False
        self._num_attended = 0
        self._num_scored = 0
        """Number of prompt tokens whose log-probabilities are requested."""
        self._num_context = 0
        self._admits: list[Admit] = []
        self._page_writes: list[PageWrite] = []
        self._decodes: list[InFlightRow] = []
        """Planned rows with one position."""
        self._speculative: list[InFlightRow] = []
        """Draft rows, and windows of running blocks."""
        self._chunks: list[InFlightRow] = []
        self._num_draft_tokens = 0
        """Maximum total number of drafts in all draft rows."""
        self.max_rounds = 1
        """Maximum number of forward passes over running blocks, as in `Plan`."""
        self.accepts: list[Accept] = []
        """Tokens accepted under a grammar, as in `Plan`."""
        self._stores: PageCopies | None = None
        self._loads: PageCopies | None = None
        self._load_stores: PageCopies | None = None
        self._loaded = 0
        self._state_loads: list[StateLoad] = []
        self._state_stores: list[StateStore] = []
        self._num_loads = 0
        self._host_state_stores: PageCopies | None = None
        self._host_state_loads: PageCopies | None = None
        self._adapter_reads: list[AdapterRead] = []
        self._adapter_drops: list[int] = []
        self._adapter_loads: list[AdapterLoad] = []

    @property
    def has_rows_without_samples(self) -> bool:
        """Whether any row only computes known tokens and samples nothing."""
        return any(not planned.row.num_samples for planned in self._rows())

    def has_row_of(self, request: Request) -> bool:
        """Whether the step computes anything for a request."""
        return any(planned.request is request for planned in self._rows())

    def admit(self, admit: Admit) -> None:
        """Adds the admission of a request, which initializes its slot's row before the step."""
        self._admits.append(admit)

    def write_pages(self, slot: int, rows: Sequence[tuple[int, list[int]]]) -> None:
        """Adds page-table entries of a slot: for each group of layers, the index of the first page
        and the page ids."""
        for group, (start, page_ids) in enumerate(rows):
            self._page_writes.append(PageWrite(slot, start, page_ids, group))

    def copy_pages(self, cache: CacheManager) -> None:
        """Adds the copies of pages to and from host memory; must be called after all rows are
        added."""
        self._num_loads = cache.num_to_load
        self._loaded = cache.loaded
        self._stores, self._loads, self._load_stores = cache.take_copies(self.seq)

    def copy_states(self, cache: CacheManager) -> None:
        """Adds the loads of state snapshots, the stores of new ones, and their copies to and from
        host memory; must be called after all rows are added."""
        self._state_loads = cache.take_loads(self.seq)
        for row, request, lease in self._rows():
            end, of_drafts = row.start + row.length, isinstance(row, DraftRow)
            if isinstance(row, DraftRow):  # the maximum position of its newest token
                end = min(end - 1, row.start + request.num_unverified - row.num_drafts)
            for store in cache.take_snapshots(lease, row.start, end, of_drafts=of_drafts):
                self._state_stores.append(StateStore(lease.slot, store.position, store.snapshot))
        self._host_state_stores, self._host_state_loads = cache.take_state_copies(self.seq)

    def copy_adapters(self, pool: AdapterPool) -> None:
        """Adds the reads, drops and loads of LoRA adapters."""
        self._adapter_reads, self._adapter_drops, self._adapter_loads = pool.take(self.seq)

    def add_row(self, request: Request, lease: Lease, length: int) -> None:
        """Adds a row for the next `length` positions of a request, and counts them as computed.

        A row that ends at the last token, known or in flight, samples the next one, unless the
        request is pooled. A row that ends at the end of a running block (block diffusion) decodes
        positions of that block.
        """
        start = request.num_computed
        end = start + length
        is_last = length == request.num_pending and not request.is_pooled
        request.num_computed = end
        self._any_masked |= is_last and request.grammar is not None
        lease.fence = self.seq
        self.num_tokens += length
        row: Row
        if request.block_size == 1:
            request.num_placeholders += is_last
            row = PlannedRow(lease.slot, start, length, int(is_last))
        elif is_last:
            row = BlockRow(lease.slot, start, length)
        else:
            row = PlannedRow(lease.slot, start, length, 0)
        if length == 1:
            self._decodes.append(InFlightRow(row, request, lease))
            self._num_context += end
        else:
            self._chunks.append(InFlightRow(row, request, lease))
            self._num_attended += _attended(start, length)
            if request.needs_prompt_logprobs:  # the first token of a prompt has no log-probability
                self._num_scored += min(end, request.num_prompt - 1) - start

    def add_draft_row(self, request: Request, lease: Lease, end: int, num_drafts: int) -> None:
        """Adds a row for a decoding request's newest token and up to `num_drafts` drafts after it.

        The position of the newest token may depend on steps in flight. Positions at or after `end`
        are not computed.
        """
        start = request.num_computed
        assert start < end, "the row has no room for new tokens"
        request.num_computed += 1
        request.num_placeholders += 1
        request.num_unverified += num_drafts
        self._any_masked |= request.grammar is not None
        lease.fence = self.seq
        self.num_tokens += 1 + num_drafts
        self._num_draft_tokens += num_drafts
        self._num_context += start + 1
        row = DraftRow(lease.slot, start, end - start, num_drafts)
        self._speculative.append(InFlightRow(row, request, lease))

    def add_window(self, request: Request, lease: Lease, start: int, end: int) -> None:
        """Adds a row for a request's running block or the next one, within [start, end).

        The outcome of the step in flight determines which of them is computed, if any.
        """
        lease.fence = self.seq
        self.num_tokens += end - start
        row = BlockRow(lease.slot, start, end - start, is_window=True)
        self._speculative.append(InFlightRow(row, request, lease))

    def finish(self, digest_seq: int, digest: int) -> tuple[Plan, StepInFlight]:
        """Returns the Plan, and the step that the scheduler keeps until it receives the result."""
        rows = self._decodes + self._speculative + self._chunks
        masked: list[int] = []
        if self._any_masked:
            grammars = [planned.request.grammar for planned in rows if planned.row.num_samples]
            masked = [number for number, grammar in enumerate(grammars) if grammar is not None]
        plan = Plan(
            seq=self.seq,
            admits=self._admits,
            page_writes=self._page_writes,
            rows=[planned.row for planned in rows],
            digest_seq=digest_seq,
            digest=digest,
            masked=masked,
            draft_threshold=self.draft_threshold,
            max_rounds=self.max_rounds,
            accepts=self.accepts,
            stores=self._stores,
            loads=self._loads,
            state_loads=self._state_loads,
            state_stores=self._state_stores,
            host_state_stores=self._host_state_stores,
            host_state_loads=self._host_state_loads,
            load_stores=self._load_stores,
            loaded=self._loaded,
            adapter_reads=self._adapter_reads,
            adapter_drops=self._adapter_drops,
            adapter_loads=self._adapter_loads,
        )
        speculative = [
            planned for planned in self._speculative if isinstance(planned.row, DraftRow)
        ]
        num_decodes = len(self._decodes) + len(speculative)
        step = StepInFlight(
            seq=self.seq,
            rows=rows,
            num_tokens=self.num_tokens,
            shape=StepShape(
                seq=self.seq,
                prefill_tokens=self.num_tokens - num_decodes - self._num_draft_tokens,
                prefill_attended=self._num_attended,
                decode_rows=num_decodes,
                decode_context=self._num_context,
                draft_rows=sum(planned.row.num_samples > 1 for planned in speculative),
                draft_tokens=self._num_draft_tokens,
                scored_tokens=self._num_scored,
            ),
            has_chunks=bool(self._chunks),
            masked=masked,
            num_loads=self._num_loads,
        )
        return plan, step

    def _rows(self) -> list[InFlightRow]:
        return self._decodes + self._speculative + self._chunks


def _attended(start: int, length: int) -> int:
    """Number of (query, key) pairs of a causal row of `length` positions that starts at `start`."""
    return length * start + length * (length + 1) // 2
