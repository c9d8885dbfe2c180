"""Pieces of a step's rows, as computed by linear-attention layers; staged with the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.states import PIECE
from worker.plan.plan import StateStore
from worker.rank.transfer import IntArray


def most_pieces(num_rows: int, num_tokens: int, page_size: int) -> int:
    """Maximum number of pieces of rows with `num_tokens` in total: each row has one that is not
    full, and states are stored at its end or at page boundaries."""
    return 2 * num_rows + num_tokens // PIECE + num_tokens // page_size


def state_arrays(
    table: IntArray, stores: Sequence[StateStore], *, first_snapshot: int, num_pieces: int = 0
) -> dict[str, IntArray]:
    """The arrays of `StateRows` by name, except slots and starts.

    Args:
        table: rows [R, 4], as in Batch.
        stores: snapshots to take of the rows' states.
        first_snapshot: index of the first snapshot in the state caches.
        num_pieces: number of pieces, the last ones empty; 0 for the actual number.
    """
    lengths = table[:, 2]
    by_slot: dict[int, list[StateStore]] = {}
    for store in sorted(stores, key=lambda store: store.position):
        by_slot.setdefault(store.slot, []).append(store)
    # Leading rows of one token are a piece each.
    (longer,) = np.nonzero(lengths != 1)
    border = int(longer[0]) if len(longer) else len(table)
    starts, rows, pieces = (list(range(border)) for _ in range(3))
    targets = border * [-1]
    if by_slot:
        for row, slot in enumerate(table[:border, 0].tolist()):
            for store in by_slot.get(slot, ()):
                targets[row] = first_snapshot + store.snapshot
    token = border
    for row, (slot, start, length, _) in enumerate(table[border:].tolist(), border):
        pieces.append(len(starts))
        ends = {store.position - start: store.snapshot for store in by_slot.get(slot, ())}
        done = 0
        for end in sorted({*ends, length}):
            first_of_end = range(done, end, PIECE)
            starts += [token + first for first in first_of_end]
            rows += len(first_of_end) * [row]
            targets += len(first_of_end) * [-1]
            done = end
            if end in ends:
                targets[-1] = first_snapshot + ends[end]
        token += length
    num_empty = max(0, num_pieces - len(starts))
    return {
        "piece_starts": np.array(starts + (num_empty + 1) * [token], dtype=np.int64),
        "piece_rows": np.array(rows + num_empty * [0], dtype=np.int64),
        "piece_targets": np.array(targets + num_empty * [-1], dtype=np.int64),
        "row_pieces": np.array([*pieces, len(starts)], dtype=np.int64),
    }
