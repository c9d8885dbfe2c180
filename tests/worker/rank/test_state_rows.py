"""Pieces of rows, against a plain count of positions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.kernels.delta_cases import Row, make_rows
from worker.plan.plan import StateStore
from worker.rank.state_rows import most_pieces, state_arrays

PAGE, FIRST = 16, 100
NAMES = ("piece_starts", "piece_rows", "piece_targets", "row_pieces")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_end_where_states_are_stored(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [1] * rng.randrange(4) + [rng.choice((0, 1, 2, 63, 64, 65, 200)) for _ in range(4)]
    rows, stores = list[Row](), list[StateStore]()
    for slot, length in enumerate(lengths):
        start = rng.randrange(40)
        borders = [end for end in range(start + 1, start + length + 1) if end % PAGE == 0]
        taken = sorted({*rng.sample(borders, rng.randint(0, len(borders))), start + length})
        own = [StateStore(slot, position, len(stores) + n) for n, position in enumerate(taken)]
        own = own if length and rng.random() < 0.7 else []
        stores += own
        ends = tuple((one.position - start, FIRST + one.snapshot) for one in own)
        rows.append(Row(slot, start, length, ends))
    table = np.array([(row.slot, row.start, row.length, 0) for row in rows], dtype=np.int64)
    rng.shuffle(stores)
    most = most_pieces(len(rows), sum(lengths), PAGE)
    for num_pieces in (0, most):
        found = state_arrays(table, stores, first_snapshot=FIRST, num_pieces=num_pieces)
        assert len(found["piece_rows"]) == num_pieces or not num_pieces
        expected = make_rows(rows, num_empty=len(found["piece_rows"]) - found["row_pieces"][-1])
        for name in NAMES:
            assert found[name].tolist() == getattr(expected, name).tolist(), name
