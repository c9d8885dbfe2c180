"""Writes go to the right cells of the right rows."""

from __future__ import annotations

import numpy as np
import torch

from worker.plan.plan import Admit, PageWrite, Plan
from worker.rank.tables import DeviceTables, ragged_ranges


def tables() -> DeviceTables:
    return DeviceTables(
        max_num_seqs=3, max_model_len=10, page_size=4, vocab_size=50, device=torch.device("cpu")
    )


def admit(slot: int, tokens: list[int]) -> Admit:
    return Admit(slot, np.array(tokens, dtype="<i4").tobytes(), 0.5, -1, 0.9, 0.1, -7)


def test_ragged_ranges() -> None:
    ranges = ragged_ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert ranges.tolist() == [5, 6, 9, 10, 11]
    assert ragged_ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).size == 0


def test_apply_writes_rows_and_leaves_others() -> None:
    state = tables()
    admits = [admit(2, [7, 8, 9]), admit(0, list(range(1, 11)))]
    state.apply(Plan(1, admits, [PageWrite(2, 0, [3]), PageWrite(0, 1, [5, 6])], []))
    assert state.token_pool[2].tolist() == [7, 8, 9] + [0] * 8
    assert state.token_pool[0].tolist() == [*range(1, 11), 0]
    assert state.token_pool[[1, 3]].sum() == 0
    assert state.page_table.tolist() == [[0, 5, 6], [0, 0, 0], [3, 0, 0], [0, 0, 0]]


def test_each_group_of_layers_has_a_page_table() -> None:
    state = DeviceTables(
        max_num_seqs=2,
        max_model_len=10,
        page_size=4,
        vocab_size=50,
        device=torch.device("cpu"),
        page_factors=[1, 2],
    )
    writes = [PageWrite(1, 0, [3, 4]), PageWrite(1, 1, [9], 1), PageWrite(0, 2, [7], 1)]
    state.apply(Plan(1, [admit(1, [5])], writes, []))
    full, window = (table.tolist() for table in state.group_tables)
    assert full == [[0, 0, 0], [3, 4, 0], [0, 0, 0]]
    assert window == [[0, 0, 14], [0, 18, 0], [0, 0, 0]], "in numbers of half as large pages"
    assert state.max_positions == 12


def test_admit_replaces_the_sampling_parameters_of_a_slot() -> None:
    state = tables()
    state.apply(Plan(1, [admit(1, [1])], [], []))
    columns = state.sampling
    assert columns.temperature[1] == np.float32(0.5)
    assert (columns.top_k[1], columns.seeds[1]) == (0, -7)
    assert columns.temperature[0] == 0.0
