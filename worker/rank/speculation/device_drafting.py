"""Drafts where steps run on a GPU: how far they were right is settled there, nobody waits.

A row's place is known on the device alone, its window is known to the host:

    planned    start ──────── where its newest token may stand ──────── end
    computed                  first ── newest ── drafts ── first + length

`first` is the newest token's position, or further left where the window ends too soon for the
row's length: what stands before the newest token is then computed once more, to no effect.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from kernels import NgramLookup, draft_ngrams
from worker.plan.plan import DraftRow, Plan, Row
from worker.rank.sampling.sampler import SamplerOutput
from worker.rank.speculation.base import Proposer
from worker.rank.speculation.drafting import (
    DraftedStep,
    Drafter,
    SettledDraws,
    UnsettledDraws,
)
from worker.rank.speculation.placement import Placement
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

_ON_DEVICE = -1


class DeviceDrafter(Drafter):
    """Drafts by prompt lookup on the device.

    Steps in which a row that floats has rules of its own, or any row a grammar, are settled on the
    host instead, which waits for the step before: what such a row may draw depends on its place.

    Args:
        tables: of the rank.
        proposer: for these steps.
        shortest: fewest tokens that count as an occurrence.
        longest: tokens that are compared.
    """

    def __init__(
        self, tables: DeviceTables, proposer: Proposer, *, shortest: int, longest: int
    ) -> None:
        super().__init__(tables, proposer)
        self._sizes = shortest, longest
        self._newest_on_device = torch.zeros(
            len(self._newest), dtype=torch.int64, device=tables.token_pool.device
        )
        """By slot, where `_newest` is _ON_DEVICE."""

    def resolve(self, plan: Plan) -> DraftedStep | None:
        """See Drafter."""
        floating = [row for row in plan.rows if isinstance(row, DraftRow)]
        if not floating:
            return super().resolve(plan)
        if plan.masked or any(self._tables.sampling.has_rules(row.slot) for row in floating):
            self._bring_home()
            return super().resolve(plan)
        self._admit(plan)
        rows = [_longest(row) if isinstance(row, DraftRow) else row for row in plan.rows]
        placement = self._place_rows(plan, rows)
        return DraftedStep(
            plan=msgspec.structs.replace(plan, rows=rows),
            row_of=range(len(rows)),
            drafts=(),
            placed=(),
            placement=placement,
        )

    def settle(
        self, plan: Plan, step: DraftedStep | None, draws: SamplerOutput | None
    ) -> SettledDraws | UnsettledDraws | None:
        """See Drafter; waits for nothing where the step was placed on the device."""
        if step is None or step.placement is None:
            return super().settle(plan, step, draws)
        assert draws is not None, "rows that float draw"
        assert draws.tokens is not None, "rows that float draw"
        placement = step.placement
        offsets, counts = placement.compare(draws.tokens)
        self._newest_on_device.index_copy_(0, placement.slots, placement.newest + counts)
        for row in plan.rows:
            if isinstance(row, DraftRow):
                self._newest[row.slot] = _ON_DEVICE
        return UnsettledDraws(rows=step.plan.rows, outcome=torch.stack((offsets, counts)))

    def _place_rows(self, plan: Plan, rows: list[Row]) -> Placement:
        tables = self._tables
        windows = [
            (number, row.slot, row.start, row.start + row.length, rows[number].length)
            for number, row in enumerate(plan.rows)
            if isinstance(row, DraftRow)
        ]
        known = self._newest[[window[1] for window in windows]]
        host = np.concatenate((np.array(windows, dtype=np.int64).T, known[None]))
        columns = to_device(torch.from_numpy(host), tables.token_pool.device)
        numbers, slots, starts, ends, lengths, known_newest = columns.unbind()
        newest = torch.where(
            known_newest == _ON_DEVICE, self._newest_on_device[slots], known_newest
        ).maximum(starts)
        placement = Placement.of(
            *(tables, rows, numbers, slots),
            starts=starts,
            ends=ends,
            lengths=lengths,
            newest=newest,
            last_ends=[row.start + row.length for row in plan.rows],
        )
        most = placement.most_tokens - 1
        if most:
            shortest, longest = self._sizes
            lookup = NgramLookup(
                slots=slots,
                newest=newest,
                count=most,
                shortest=shortest,
                longest=longest,
                num_tokens=int(host[3].max()) + 1,
            )
            placement.write(draft_ngrams(tables.token_pool, lookup))
        return placement.expecting()

    def _bring_home(self) -> None:
        """Waits for the steps in flight."""
        away = self._newest == _ON_DEVICE
        if away.any():
            self._newest[away] = self._newest_on_device.cpu().numpy()[away]


def _longest(row: DraftRow) -> DraftRow:
    num_drafts = min(row.num_drafts, row.length - 1)
    return DraftRow(row.slot, row.start, 1 + num_drafts, num_drafts)
