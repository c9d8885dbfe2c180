"""Draws whose logits depend on the draws before them in the same row.

Penalties count the tokens before a position, the row's own drafts among them. All first positions
are drawn at once and counted, then the second positions of the rows whose first draft was right,
and so on: whatever is drawn was counted before by the very operations of plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.plan.plan import DraftRow, PlannedRow
from worker.rank.sampling.draws import Draws, sample_with_rules
from worker.rank.sampling.logprobs import Scores
from worker.rank.sampling.masks import MaskRows
from worker.rank.sampling.sampler import gather_random_rows, sample
from worker.rank.speculation.drafting import DraftedStep
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

NOT_DRAWN = -1


def draw_in_waves(
    logits: torch.Tensor, step: DraftedStep, tables: DeviceTables, masks: MaskRows | None
) -> Draws:
    """Draws for fp32 logits [S, vocab], which it leaves as they are; waits for the device.

    Draws after a wrong draft are NOT_DRAWN.
    """
    expected = _expected(step)
    places = [
        PlannedRow(row.slot, row.start + row.length - row.num_draws + number, 1, True)
        for row in step.plan.rows
        for number in range(row.num_draws)
    ]
    tokens = [NOT_DRAWN] * len(places)
    scores: list[tuple[Sequence[int], Scores]] = []
    wave: list[int] = []
    draw = 0
    for row in step.plan.rows:
        wave += [draw] if row.num_draws else []
        draw += row.num_draws
    while wave:
        draws = _draw(logits, wave, [places[draw] for draw in wave], tables, masks)
        assert draws.tokens is not None
        for draw, token in zip(wave, draws.tokens.tolist(), strict=True):
            tokens[draw] = token
        if draws.scores is not None:
            scores.append(([wave[row] for row in draws.scored_rows], draws.scores))
        wave = [draw + 1 for draw in wave if expected[draw] == tokens[draw]]
    return Draws(
        tokens=torch.tensor(tokens, device=logits.device),
        scores=_joined([score for _, score in scores]) if scores else None,
        scored_rows=[draw for rows, _ in scores for draw in rows],
    )


def _draw(
    logits: torch.Tensor,
    wave: Sequence[int],
    places: Sequence[PlannedRow],
    tables: DeviceTables,
    masks: MaskRows | None,
) -> Draws:
    device = logits.device
    own = logits.index_select(0, to_device(torch.tensor(wave), device))
    random = gather_random_rows(
        tables.sampling,
        np.array([place.slot for place in places]),
        np.array([place.start + 1 for place in places]),
        device,
    )
    own_masks = None if masks is None else masks.among(wave)
    rules = tables.rules.gather(places)
    if rules is not None:
        return sample_with_rules(own, random, rules, tables, own_masks)
    if own_masks is not None:
        own_masks.apply(own, native=tables.native_draws)
    return Draws(tokens=sample(own, random, native=tables.native_draws))


def _expected(step: DraftedStep) -> list[int | None]:
    """By draw: the draft that it must equal for the next one of its row to count."""
    placed = iter(step.placed)
    expected: list[int | None] = []
    for row in step.plan.rows:
        if isinstance(row, DraftRow):
            expected += [*step.drafts[next(placed)], None]
        elif row.num_draws:
            expected.append(None)
    return expected


def _joined(scores: Sequence[Scores]) -> Scores:
    def join(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for one in scores])

    return Scores(
        tokens=join("tokens"),
        own=join("own"),
        best=join("best"),
        weight=join("weight"),
        rank=join("rank"),
        top_tokens=join("top_tokens"),
        top_logits=join("top_logits"),
        num_top=[number for one in scores for number in one.num_top],
    )
