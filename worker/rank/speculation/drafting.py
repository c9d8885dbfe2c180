"""Gives rows that float their places and drafts, and tells how far the drafts were right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from worker.plan.plan import DraftRow, Plan, Row, StepResult
from worker.rank.sampling.sampler import SamplerOutput
from worker.rank.speculation.base import DraftRequest, Proposer, Tokens, count_equal
from worker.rank.speculation.placement import Placement
from worker.rank.streams import StepSlot
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

NO_ROW = -1
_ENDED = 1 << 62
"""A position beyond all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedStep:
    """A Plan whose rows have their places."""

    plan: Plan
    """Rows that float have exactly their length and their number of drafts."""
    row_of: Sequence[int]
    """By row of the Plan as it came: the row here, or NO_ROW where there was nothing to compute."""
    drafts: Sequence[Sequence[int]]
    """By row of the Plan as it came that floats; empty where there was nothing to compute."""
    placed: Sequence[int]
    """Which of those have a row here, ascending."""
    placement: Placement | None = None
    """Where the places are known on the device alone: `plan` then has the longest rows."""

    def masked_drafts(self, source: Plan) -> list[list[int]]:
        """Drafts of each of the masked rows of the Plan as it came."""
        floating = iter(self.drafts)
        by_sample = [
            next(floating) if isinstance(row, DraftRow) else ()
            for row in source.rows
            if row.num_draws
        ]
        return [list(by_sample[sample]) for sample in source.masked]

    def masked_draws(self, source: Plan, masks: bytes, size: int) -> tuple[list[int], bytes]:
        """Which draws are masked, and their masks, of `size` bytes each.

        Args:
            source: the Plan as it came.
            masks: of each masked row's token and of what follows its drafts. Of rows that are not
                here there is one too.
            size: bytes of a mask.
        """
        first_draws: list[int] = []
        draw = 0
        for row in self.plan.rows:
            first_draws.append(draw)
            draw += row.num_draws
        by_sample = [
            place for row, place in zip(source.rows, self.row_of, strict=True) if row.num_draws
        ]
        draws: list[int] = []
        kept: list[bytes] = []
        at = 0
        for sample in source.masked:
            place = by_sample[sample]
            count = 1 if place == NO_ROW else self.plan.rows[place].num_draws
            if place != NO_ROW:
                draws += range(first_draws[place], first_draws[place] + count)
                kept.append(masks[at * size : (at + count) * size])
            at += count
        return draws, b"".join(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledDraws:
    """Which of a step's draws count."""

    kept: list[int]
    """Draws, ascending."""
    drafted: list[int]
    """Per row that floats, as in StepResult."""
    drawn: list[int]
    row_of: Sequence[int]
    """As in DraftedStep."""

    def fetch(self, slot: StepSlot) -> SettledDraws:
        """The same on the host, where it is."""
        return self

    def of(self, result: StepResult) -> StepResult:
        """The result of these draws, from that of all."""
        logprobs, prompts = result.logprobs, result.prompt_logprobs
        if prompts is not None:
            places = {place: row for row, place in enumerate(self.row_of)}
            prompts = {places[place]: scored for place, scored in prompts.items()}
        return msgspec.structs.replace(
            result,
            token_ids=[result.token_ids[draw] for draw in self.kept],
            logprobs=None if logprobs is None else [logprobs[draw] for draw in self.kept],
            prompt_logprobs=prompts,
            drafted=self.drafted,
            drawn=self.drawn,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsettledDraws:
    """Which of a step's draws count, told by the device."""

    rows: list[Row]
    """Of the step."""
    outcome: torch.Tensor
    """[2, F]: the draw with which each row that floats begins to count, and how many count."""

    def fetch(self, slot: StepSlot) -> UnsettledDraws:
        """The same on the host once the slot's step has completed."""
        return replace(self, outcome=slot.fetch(self.outcome))

    def of(self, result: StepResult) -> StepResult:
        """The result of the draws that count, from that of all."""
        offsets, counts = self.outcome.tolist()
        kept: list[int] = []
        drafted: list[int] = []
        draw = 0
        for row in self.rows:
            if not isinstance(row, DraftRow):
                kept += range(draw, draw + row.num_draws)
            else:
                offset, count = offsets[len(drafted)], counts[len(drafted)]
                kept += range(draw + offset, draw + offset + count)
                drafted.append(max(0, row.length - 1 - offset))
            draw += row.num_draws
        settled = SettledDraws(
            kept=kept, drafted=drafted, drawn=counts, row_of=range(len(self.rows))
        )
        return settled.of(result)


class Drafter:
    """One rank's drafts, and where its slots stand.

    Args:
        tables: of the rank; drafts are written to the token pool, as tokens to compute.
        proposer: guesses.
    """

    def __init__(self, tables: DeviceTables, proposer: Proposer) -> None:
        self._tables = tables
        self._proposer = proposer
        self._newest = np.zeros(tables.token_pool.shape[0], dtype=np.int64)
        """By slot: the position of its newest token, which is not computed yet, after the last row
        that floated; _ENDED where that or one before it ends the request, as the scheduler is still
        to see. Where the Plan has a later one, rows since then had their places in Plans."""
        self._end_tokens: dict[int, frozenset[int]] = {}
        """By slot; only ever asked for membership."""
        self._tokens = HostTokens(tables)

    def resolve(self, plan: Plan) -> DraftedStep | None:
        """Places rows and drafts; None for a Plan in which no row floats."""
        self._admit(plan)
        if not any(isinstance(row, DraftRow) for row in plan.rows):
            return None
        if self._tables.token_pool.device.type == "cpu":
            # Drafts may reach into pages that this very Plan writes.
            self._tables.apply(plan)
            plan = msgspec.structs.replace(plan, admits=[], page_writes=[])
        placed = [self._place(row) for row in plan.rows]
        drafting = [row for row in placed if isinstance(row, DraftRow) and row.num_drafts]
        proposed = iter(self._propose(drafting, plan.draft_threshold))
        rows: list[Row] = []
        row_of: list[int] = []
        drafts: list[Sequence[int]] = []
        floating: list[int] = []
        for row in placed:
            if row is None:
                row_of.append(NO_ROW)
                drafts.append(())
                continue
            row_of.append(len(rows))
            if isinstance(row, DraftRow):
                found = next(proposed) if row.num_drafts else ()
                floating.append(len(drafts))
                drafts.append(found)
                row = DraftRow(row.slot, row.start, 1 + len(found), len(found))
            rows.append(row)
        self._write(rows, [found for found in drafts if found])
        return DraftedStep(
            plan=msgspec.structs.replace(plan, rows=rows),
            row_of=row_of,
            drafts=drafts,
            placed=floating,
        )

    def settle(
        self, plan: Plan, step: DraftedStep | None, draws: SamplerOutput | None
    ) -> SettledDraws | UnsettledDraws | None:
        """Notes where the slots stand after a step, and compares its draws with its drafts.

        Where rows float it waits for the device: how many draws count, and with that where the next
        step's rows begin, is decided here.

        Args:
            plan: as it came.
            step: as resolved.
            draws: of all rows of `step`.
        """
        if step is None:
            return None
        drawn = None if draws is None else draws.tokens
        return self._compare(step, [] if drawn is None else drawn.tolist())

    def _admit(self, plan: Plan) -> None:
        for admit in plan.admits:
            self._proposer.admit(admit.slot, admit.end_token_ids)
            self._tokens.admit(admit.slot)
            self._newest[admit.slot] = 0
            if admit.end_token_ids:
                self._end_tokens[admit.slot] = frozenset(admit.end_token_ids)
            else:
                self._end_tokens.pop(admit.slot, None)

    def _compare(self, step: DraftedStep, tokens: Sequence[int]) -> SettledDraws:
        kept: list[int] = []
        drawn = [0] * len(step.drafts)
        placed = iter(step.placed)
        draw = 0
        for row in step.plan.rows:
            if not isinstance(row, DraftRow):
                kept += range(draw, draw + row.num_draws)
                draw += row.num_draws
                continue
            number = next(placed)
            draft = step.drafts[number]
            count = 1 + count_equal(draft, tokens[draw : draw + len(draft)])
            kept += range(draw, draw + count)
            drawn[number] = count
            self._advance(row.slot, row.start + count, tokens[draw : draw + count])
            draw += row.num_draws
        return SettledDraws(
            kept=kept,
            drafted=[len(draft) for draft in step.drafts],
            drawn=drawn,
            row_of=step.row_of,
        )

    def _advance(self, slot: int, newest: int, tokens: Sequence[int]) -> None:
        ends = self._end_tokens.get(slot)
        if ends is not None and not ends.isdisjoint(tokens):
            newest = _ENDED
        self._newest[slot] = newest

    def _place(self, row: Row) -> Row | None:
        if not isinstance(row, DraftRow):
            return row
        newest, end = int(self._newest[row.slot]), row.start + row.length
        if newest < row.start:
            ends = self._end_tokens.get(row.slot, ())
            newest = _ENDED if self._tokens.is_known_in(row.slot, row.start, ends) else row.start
        if newest >= end:
            return None
        return DraftRow(row.slot, newest, 1, min(row.num_drafts, end - newest - 1))

    def _propose(self, rows: Sequence[DraftRow], threshold: float) -> list[list[int]]:
        if not rows:
            return []
        known = self._tokens.rows([(row.slot, row.start + 1) for row in rows])
        return self._proposer.propose(
            [
                DraftRequest(row.slot, tokens, row.num_drafts)
                for row, tokens in zip(rows, known, strict=True)
            ],
            threshold,
        )

    def _write(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> None:
        if not drafts:
            return
        if self._tables.token_pool.device.type == "cpu":
            pool = self._tables.token_pool.numpy()
            drafting = [row for row in rows if row.num_draws > 1]
            for row, draft in zip(drafting, drafts, strict=True):
                pool[row.slot, row.start + 1 : row.start + 1 + len(draft)] = draft
            return
        stride = self._tables.token_stride
        places = [row.slot * stride + row.start + 1 for row in rows if row.num_draws > 1]
        assert len(places) == len(drafts)
        cells = [
            place + number
            for place, draft in zip(places, drafts, strict=True)
            for number in range(len(draft))
        ]
        flat = self._tables.flat_tokens
        values = [token for draft in drafts for token in draft]
        flat.index_copy_(
            0,
            to_device(torch.tensor(cells), flat.device),
            to_device(torch.tensor(values, dtype=torch.int32), flat.device),
        )


class HostTokens:
    """Token rows as the host sees them: on CPU the pool itself, elsewhere a copy that follows."""

    def __init__(self, tables: DeviceTables) -> None:
        self._pool = tables.token_pool
        self._is_own = self._pool.device.type != "cpu"
        self._host: Tokens = self._pool.cpu().numpy()
        self._known = np.zeros(len(self._host), dtype=np.int64)

    def admit(self, slot: int) -> None:
        """Drops what is known of a slot."""
        self._known[slot] = 0

    def is_known_in(self, slot: int, position: int, tokens: Collection[int]) -> bool:
        """Whether a token is one of some; False too where the host would wait for it."""
        return bool(tokens) and not self._is_own and int(self._host[slot, position]) in tokens

    def rows(self, places: Sequence[tuple[int, int]]) -> list[Tokens]:
        """The first tokens of each slot, given as (slot, number). Waits for the device."""
        if self._is_own:
            self._follow(places)
        return [self._host[slot, :number] for slot, number in places]

    def _follow(self, places: Sequence[tuple[int, int]]) -> None:
        for slot, number in places:
            first = int(self._known[slot])
            self._host[slot, first:number] = self._pool[slot, first:number].cpu().numpy()
            self._known[slot] = number
