"""Drafter of one rank: sets the lengths and positions of speculative rows, drafts for them, and
tracks the outcome.

A row begins at its slot's newest token, which is sampled but not computed. While the previous step
is in flight, the position of that token is only known on the device. The device computes the
positions of a step's rows if the host does not need them. Otherwise, the host computes them after
waiting for the previous step (on CPU, that step has always completed).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from worker.plan.plan import DraftRow, Plan, Row
from worker.rank.placement import DevicePlacement, HostPlacement
from worker.rank.sampler import SamplerOutput
from worker.rank.speculation.base import (
    NO_GUESSES,
    DeviceProposer,
    DraftRequest,
    Guesses,
    Proposer,
)
from worker.rank.tables import DeviceTables
from worker.rank.transfer import gather, scatter
from worker.rank.verification import (
    NO_ROW,
    AcceptedTokens,
    DeviceRows,
    HostRows,
    SpeculativeRows,
    count_equal,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedStep:
    """A Plan whose speculative rows have their lengths and, if the host computes them, their
    positions."""

    plan: Plan
    """The Plan with these rows, without rows that have nothing to compute."""
    row_of: Sequence[int]
    """Rows of `plan`, by row of the source Plan; NO_ROW for omitted ones."""
    speculative: SpeculativeRows | None
    """Speculative rows of `plan`; None if there are none."""
    guesses: Sequence[Guesses] = ()
    """Guesses by speculative row of `plan`; empty if the device computes the positions."""

    def masked_drafts(self, source: Plan) -> list[list[int]]:
        """Drafts of each masked row of the source Plan."""
        guesses, computed = iter(self.guesses), self.plan.rows
        drafts = [next(guesses).drafts if isinstance(row, DraftRow) else [] for row in computed]
        rows = self._sampling_rows(source)
        return [drafts[rows[sample]] if rows[sample] != NO_ROW else [] for sample in source.masked]

    def masked_samples(self, source: Plan, masks: bytes, size: int) -> tuple[list[int], bytes]:
        """Indices of the masked samples, and their masks, concatenated.

        Args:
            source: Plan that the coordinator sent.
            masks: concatenated masks; each masked row has one per draft plus one, or a single one
                if the row was omitted.
            size: size of one mask in bytes.
        """
        first_samples = [0, *itertools.accumulate(row.num_samples for row in self.plan.rows)]
        rows = self._sampling_rows(source)
        samples: list[int] = []
        kept: list[bytes] = []
        at = 0
        for row in (rows[sample] for sample in source.masked):
            count = 1
            if row != NO_ROW:
                span = range(first_samples[row], first_samples[row + 1])
                count = len(span)
                samples += span
                kept.append(masks[at * size : (at + count) * size])
            at += count
        return samples, b"".join(kept)

    def _sampling_rows(self, source: Plan) -> list[int]:
        """Rows of `plan`, by sampling row of the source Plan; NO_ROW for omitted ones."""
        pairs = zip(source.rows, self.row_of, strict=True)
        return [computed for row, computed in pairs if row.num_samples]


class Drafter:
    """Sets the lengths and positions of speculative rows in one rank's steps, drafts for them, and
    tracks the positions of the newest tokens.

    Args:
        tables: the rank's tables; drafts are written to the token pool.
        proposer: proposer of drafts.
        on_device: the same proposer if it drafts on the device, where positions may then be
            computed; otherwise None.
    """

    def __init__(
        self, tables: DeviceTables, proposer: Proposer, on_device: DeviceProposer | None = None
    ) -> None:
        self._tables = tables
        self._proposer = proposer
        self._on_device = on_device
        self._newest = torch.zeros(
            len(tables.token_pool), dtype=torch.int64, device=tables.token_pool.device
        )
        """[slots]: position of the newest token after the slot's last speculative row. Later rows
        that are not speculative do not update it: a later start in a Plan takes precedence."""
        self._end_tokens: dict[int, frozenset[int]] = {}
        """EOS and stop tokens by slot."""

    def place(self, plan: Plan) -> DraftedStep | None:
        """Sets the lengths and positions of a Plan's speculative rows, and drafts for them;
        returns None if there are no such rows.

        The host computes the positions, after waiting for the step in flight, if any speculative
        row has logits processors, any row has a grammar, or the attention backend needs exact
        lengths.
        """
        self._admit(plan)
        slots = [row.slot for row in plan.rows if isinstance(row, DraftRow)]
        if not slots:
            return None
        if (
            self._on_device is None
            or plan.masked
            or any(map(self._tables.sampling.has_processors, slots))
        ):
            return self._place_on_host(plan)
        return self._place_on_device(plan, self._on_device)

    def observe(self, step: DraftedStep, output: SamplerOutput | None) -> AcceptedTokens:
        """Updates the positions of the newest tokens after a step. If the host computed the step's
        positions, waits for the step and updates the proposer's estimates.

        Args:
            step: the step as returned by `place`.
            output: sampled tokens and acceptance of its rows.
        """
        rows, acceptance = step.speculative, None if output is None else output.acceptance
        if rows is not None:
            assert output is not None, "speculative rows sample"
            assert output.tokens is not None, "speculative rows sample"
            assert acceptance is not None, "speculative rows are verified"
            if rows.on_device is None:
                self._learn(step, output.tokens.tolist(), acceptance.counts.tolist())
            rows.placement.advance(self._newest, acceptance.counts)
        return AcceptedTokens(
            rows=step.plan.rows,
            row_of=step.row_of,
            acceptance=acceptance,
        )

    def forget(self) -> None:
        """Resets the outcomes of all guesses, after warm-up."""
        self._proposer.calibration.reset()

    def _admit(self, plan: Plan) -> None:
        if not plan.admits:
            return
        for admit in plan.admits:
            self._proposer.admit(admit.slot, admit.end_token_ids)
            self._end_tokens[admit.slot] = frozenset(admit.end_token_ids)
        scatter(self._newest, [admit.slot for admit in plan.admits], [0] * len(plan.admits))

    def _place_on_device(self, plan: Plan, proposer: DeviceProposer) -> DraftedStep:
        plan = self._with_pages(plan)
        rows = [_longest(row) if isinstance(row, DraftRow) else row for row in plan.rows]
        placement = DevicePlacement.of(plan, rows, self._newest, self._tables)
        proposer.draft(placement, [row for row in plan.rows if isinstance(row, DraftRow)])
        speculative = DeviceRows(placement=placement, expected=placement.tokens_after())
        return DraftedStep(
            plan=msgspec.structs.replace(plan, rows=rows),
            row_of=range(len(rows)),
            speculative=speculative,
        )

    def _place_on_host(self, plan: Plan) -> DraftedStep:
        plan = self._with_pages(plan)
        windows = [row for row in plan.rows if isinstance(row, DraftRow)]
        placed = self._positions(windows)
        found = iter(self._guess(placed, plan.draft_threshold))
        placements = iter(placed)
        rows: list[Row] = []
        row_of: list[int] = []
        guesses: list[Guesses] = []
        for row in plan.rows:
            if isinstance(row, DraftRow):
                if (window := next(placements)) is None:
                    row_of.append(NO_ROW)
                    continue
                guesses.append(next(found))
                num_drafts = guesses[-1].num_drafts
                row = DraftRow(row.slot, window.start, 1 + num_drafts, num_drafts)
            row_of.append(len(rows))
            rows.append(row)
        return DraftedStep(
            plan=msgspec.structs.replace(plan, rows=rows),
            row_of=row_of,
            speculative=self._with_drafts(rows, guesses) if guesses else None,
            guesses=guesses,
        )

    def _with_pages(self, plan: Plan) -> Plan:
        """Applies the Plan's writes to the tables first if drafting needs them: drafts may extend
        into pages that this Plan adds. Returns the Plan without these writes."""
        if not (self._newest.is_cpu or self._proposer.needs_pages):
            return plan
        self._tables.apply(plan)
        return msgspec.structs.replace(plan, admits=[], page_writes=[])

    def _positions(self, rows: Sequence[DraftRow]) -> list[DraftRow | None]:
        """Newest token of each row, as a row of one position, and the number of drafts that fit the
        row's window; None if the token is past the window or ends the request."""
        known = gather(self._newest, [row.slot for row in rows])
        newest = [max(position, row.start) for position, row in zip(known, rows, strict=True)]
        stride = self._tables.token_stride
        cells = [row.slot * stride + at for row, at in zip(rows, newest, strict=True)]
        placed: list[DraftRow | None] = []
        tokens = gather(self._tables.flat_tokens, cells)
        for row, position, token in zip(rows, newest, tokens, strict=True):
            num_left = row.start + row.length - position - 1
            if num_left < 0 or token in self._end_tokens[row.slot]:
                placed.append(None)
            else:
                placed.append(DraftRow(row.slot, position, 1, min(row.num_drafts, num_left)))
        return placed

    def _guess(self, placed: Sequence[DraftRow | None], threshold: float) -> list[Guesses]:
        """Guesses for each row of `placed`; entries that are None are skipped."""
        rows = [row for row in placed if row is not None]
        requests = [
            DraftRequest(row.slot, row.start + 1, row.num_drafts) for row in rows if row.num_drafts
        ]
        proposed = iter(self._proposer.propose(requests, threshold) if requests else ())
        return [
            next(proposed).up_to(self._end_tokens[row.slot]) if row.num_drafts else NO_GUESSES
            for row in rows
        ]

    def _with_drafts(self, rows: Sequence[Row], guesses: Sequence[Guesses]) -> HostRows:
        """Writes the drafts to the token pool; returns the step's speculative rows."""
        placement = HostPlacement.of(rows, [guess.drafts for guess in guesses])
        placement.write(self._tables)
        return HostRows(placement=placement)

    def _learn(self, step: DraftedStep, tokens: Sequence[int], counts: Sequence[int]) -> None:
        """Updates the proposer's estimates.

        Args:
            step: a step whose positions the host computed.
            tokens: all sampled tokens of the step.
            counts: number of accepted tokens, by speculative row.
        """
        assert isinstance(step.speculative, HostRows), "the device verifies the step"
        placement = step.speculative.placement
        rows = zip(placement.slots, placement.first_samples, step.guesses, counts, strict=True)
        for slot, first, guesses, count in rows:
            if guesses.token_ids:
                num_right = count_equal(guesses.token_ids, tokens[first : first + count])
                self._proposer.observe(slot, guesses, num_right, count)


def _longest(row: DraftRow) -> DraftRow:
    num_drafts = min(row.num_drafts, row.length - 1)
    return DraftRow(row.slot, row.start, 1 + num_drafts, num_drafts)
