"""Arrays of a step for layers that keep states: the chunks into which its rows are divided
(`StateRows`), and its drafts. They are staged with the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kernels.states import PIECE
from worker.plan.plan import StateStore
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray


def most_pieces(num_rows: int, num_tokens: int, page_size: int) -> int:
    """Maximum number of chunks of rows with `num_tokens` in total: each row has one chunk that is
    not full, and states are stored at a row's end or at page boundaries."""
    return 2 * num_rows + num_tokens // PIECE + num_tokens // page_size


def state_arrays(
    table: IntArray, stores: Sequence[StateStore], *, first_snapshot: int, num_pieces: int = 0
) -> dict[str, IntArray]:
    """The arrays of `StateRows` by name, except slots and starts.

    Args:
        table: rows [R, 4], as in Batch.
        stores: snapshots to take of the states within the rows; others are ignored.
        first_snapshot: index of the first snapshot in the state caches.
        num_pieces: number of chunks, of which the last ones may be empty; 0 for the actual number.
    """
    lengths = table[:, 2]
    by_slot: dict[int, list[StateStore]] = {}
    for store in sorted(stores, key=lambda store: store.position):
        by_slot.setdefault(store.slot, []).append(store)
    # Each leading row with one token is a chunk.
    (longer,) = np.nonzero(lengths != 1)
    border = int(longer[0]) if len(longer) else len(table)
    starts, rows, pieces = (list(range(border)) for _ in range(3))
    targets = border * [-1]
    if by_slot:
        for row, slot in enumerate(table[:border, 0].tolist()):
            for store in by_slot.get(slot, ()):
                if store.position == table[row, 1] + 1:
                    targets[row] = first_snapshot + store.snapshot
    token = border
    for row, (slot, start, length, _) in enumerate(table[border:].tolist(), border):
        pieces.append(len(starts))
        ends = {
            store.position - start: store.snapshot
            for store in by_slot.get(slot, ())
            if start < store.position <= start + length
        }
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


class DraftRows(NamedTuple):
    """A step's draft rows, and rows that follow draft rows, in a model whose layers keep states."""

    drafts: Sequence[int] = ()
    """Indices of the draft rows among the step's rows."""
    replayed: Sequence[int] = ()
    """Indices of the rows before which tokens may be replayed."""


def arrays_of_states(
    table: IntArray,
    stores: Sequence[StateStore],
    drafts: DraftRows | None,
    tables: DeviceTables,
    num_tokens: int,
) -> dict[str, IntArray]:
    """Arrays of a step for layers that keep states: those of `state_arrays` and, with `drafts` or
    on a graph for rows of any length, those of `draft_arrays`.

    Args:
        table: rows [R, 4], as in Batch.
        stores: snapshots to take of the rows' states.
        drafts: draft rows; None if there are none, and nothing is replayed.
        tables: the rank's tables.
        num_tokens: number of tokens of a graph for rows of any length; otherwise 0.
    """
    first_snapshot, num_pieces, num_kept = tables.dummy_slot + 1, 0, 0
    if num_tokens:
        num_pieces = most_pieces(len(table), num_tokens, tables.page_size)
        num_kept = min(num_tokens, len(table) * tables.num_replayed)
    found = drafts or DraftRows()
    within, before = split_stores(table, found.drafts, stores)
    arrays = state_arrays(table, within, first_snapshot=first_snapshot, num_pieces=num_pieces)
    if num_tokens:  # the graph replays before each row
        found = found._replace(replayed=range(len(table)))
    if not tables.num_replayed or not (num_tokens or drafts):
        return arrays
    return arrays | draft_arrays(
        *(table, found, before),
        first_snapshot=first_snapshot,
        dummy_slot=tables.dummy_slot,
        num_kept=num_kept,
    )


def split_stores(
    table: IntArray, drafts: Sequence[int], stores: Sequence[StateStore]
) -> tuple[list[StateStore], dict[int, StateStore]]:
    """Splits the snapshots of a step into two kinds: those taken within rows, and, by slot, those
    taken during the replay before a row. Snapshots of draft rows are of the second kind, since only
    the device knows where the row begins."""
    if not stores:
        return [], {}
    of_drafts = set(drafts)
    starts = {
        slot: (start, row in of_drafts) for row, (slot, start, *_) in enumerate(table.tolist())
    }
    within: list[StateStore] = []
    before: dict[int, StateStore] = {}
    for store in stores:
        start, is_draft = starts.get(store.slot, (0, True))
        if is_draft or store.position <= start:
            before[store.slot] = store
        else:
            within.append(store)
    return within, before


def draft_arrays(
    table: IntArray,
    rows: DraftRows,
    before: Mapping[int, StateStore],
    *,
    first_snapshot: int,
    dummy_slot: int,
    num_kept: int = 0,
) -> dict[str, IntArray]:
    """Arrays from which the device computes `StateRows.kept` and `Replay`, by name: `kept` [R];
    `replay_rows`, `replay_positions` and `replay_targets` [F]: rows before which tokens are
    replayed, the positions whose states are stored during the replay, and the indices where they
    are stored; `kept_tokens`, `kept_rows` and `kept_slots` [M]: tokens whose inputs are kept, their
    rows and slots.

    Args:
        table: rows [R, 4], as in Batch.
        rows: draft rows, and rows before which tokens are replayed.
        before: snapshots of states that are replayed, by slot.
        first_snapshot: index of the first snapshot in the state caches.
        dummy_slot: slot of padding.
        num_kept: M, if it is larger than the number of tokens of the draft rows.
    """
    slots, _, lengths, _ = table.T
    kept = slots.copy()
    kept[list(rows.drafts)] = -1
    stores = [before.get(slot) for slot in slots[list(rows.replayed)].tolist()]
    positions = [-1 if store is None else store.position for store in stores]
    targets = [-1 if store is None else first_snapshot + store.snapshot for store in stores]
    firsts = np.cumsum(lengths) - lengths
    tokens = [
        (firsts[row] + offset, row, slots[row])
        for row in rows.drafts
        for offset in range(lengths[row])
    ]
    tokens += (num_kept - len(tokens)) * [(0, 0, dummy_slot)]
    columns = np.ascontiguousarray(np.array(tokens, dtype=np.int64).reshape(-1, 3).T)
    return {
        "kept": kept,
        "replay_rows": np.array(rows.replayed, dtype=np.int64),
        "replay_positions": np.array(positions, dtype=np.int64),
        "replay_targets": np.array(targets, dtype=np.int64),
        "kept_tokens": columns[0],
        "kept_rows": columns[1],
        "kept_slots": columns[2],
    }
