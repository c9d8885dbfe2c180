"""Which decode steps are captured, how they are padded, and how slots and staging take turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from worker.config import EngineConfig
from worker.plan.plan import Admit, PlannedRow
from worker.rank.graphs import BlockGraphs, DecodeGraphs, capture_sizes
from worker.rank.static_blocks import fill_blocks
from worker.rank.static_step import StaticInputs, columns_size, fill_columns
from worker.rank.streams import SlotRing, staging_size
from worker.rank.tables import DeviceTables
from worker.rank.transfer import Staging, uploader_to

CPU = torch.device("cpu")


def config(max_num_seqs: int, *sizes: int) -> EngineConfig:
    return EngineConfig(model="m", max_num_seqs=max_num_seqs, cudagraph_capture_sizes=sizes)


def test_default_sizes_end_with_the_largest_step() -> None:
    assert capture_sizes(config(1)) == (1,)
    assert capture_sizes(config(3)) == (1, 2, 3)
    assert capture_sizes(config(20)) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(config(64)) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    many = capture_sizes(config(4000))
    assert many[-3:] == (480, 496, 512)
    assert many == tuple(sorted(set(many)))


def test_given_sizes_are_sorted_and_no_larger_than_a_step() -> None:
    assert capture_sizes(config(16, 8, 2, 32, 64)) == (2, 8, 16)
    with pytest.raises(ValueError, match="--cudagraph-capture-sizes"):
        config(16, 0)


class FakeStep:
    """Notes what a graph would compute."""

    def __init__(self) -> None:
        self.journal: list[tuple[str, int] | tuple[str, int, bool]] = []
        self.hidden = torch.zeros(8, 2)
        self.tokens = torch.arange(8)

    def forward(self, size: int) -> None:
        self.journal.append(("forward", size))

    def sample(self, size: int, *, filters: bool) -> None:
        self.journal.append(("sample", size, filters))


def test_a_step_replays_the_smallest_graph_that_holds_it() -> None:
    step = FakeStep()
    captured: list[Callable[[], None]] = []

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        captured.append(launch)
        return launch

    graphs = DecodeGraphs(step, (1, 4, 8), capture, show_progress=False)  # type: ignore[arg-type]
    captured[0]()
    assert step.journal == [("forward", 8)], "the largest takes its memory first"
    assert len(captured) == 9
    decodes = [PlannedRow(slot, 9, 1, True) for slot in range(9)]
    wanted = {1: 1, 2: 4, 4: 4, 5: 8, 8: 8, 9: None}
    assert {count: graphs.size_for(decodes[:count]) for count in wanted} == wanted
    assert graphs.size_for([]) is None
    assert graphs.size_for([decodes[0], PlannedRow(7, 0, 2, True)]) is None
    step.journal.clear()
    inputs = StaticInputs(size=4, num_rows=3, samples=None, filters=True)
    assert graphs.forward(inputs).shape == (3, 2)
    assert graphs.sample(inputs, None).tolist() == [0, 1, 2]
    assert step.journal == [("forward", 4), ("sample", 4, True)]


def test_blocks_are_captured_two_by_request_and_not_beyond_what_launching_costs() -> None:
    assert capture_sizes(config(1), 8) == (1, 2)
    assert capture_sizes(config(4), 8) == (1, 2, 4, 8)
    assert capture_sizes(config(400), 32)[-1] == 64
    assert capture_sizes(config(400, 3, 700), 32) == (3, 64)


def test_a_pass_over_blocks_is_padded_with_the_dummy_slot() -> None:
    tables = make_tables()
    tables.block_size = 4
    rows = [PlannedRow(2, 8, 4, True), PlannedRow(5, 4, 12, True)]
    columns, inputs = fill_blocks(rows, tables, 6)
    assert columns.reshape(2, 6).tolist() == [[2, 5, 5, 5, 6, 6], [8, 4, 8, 12, 0, 0]]
    assert inputs == StaticInputs(size=6, num_rows=4, samples=None, filters=False)

    class Blocks(FakeStep):
        block_size = 4

    step = Blocks()
    graphs = BlockGraphs(step, (1, 2), lambda launch: launch, show_progress=False)  # type: ignore[arg-type]
    assert graphs.size_for(rows[:1]) == 1
    assert graphs.size_for([rows[0], rows[0]]) == 2
    assert graphs.size_for(rows) is None
    assert graphs.size_for([]) is None
    assert graphs.forward(StaticInputs(size=2, num_rows=1, samples=None, filters=False)).shape == (
        4,
        2,
    )
    assert step.journal == [("forward", 2)]


def make_tables() -> DeviceTables:
    tables = DeviceTables(max_num_seqs=6, max_model_len=32, page_size=8, vocab_size=50, device=CPU)
    for slot, sampling in ((2, (0.0, 3, 0.5)), (4, (0.7, 0, 1.0)), (5, (0.7, 9, 0.9))):
        tables.sampling.set(Admit(slot, b"", *sampling, 0.1 if slot == 5 else 0.0, 70 + slot))
    return tables


def test_columns_hold_the_rows_and_padding_on_the_dummy_slot() -> None:
    tables = make_tables()
    rows = np.array([(2, 4, 1, True), (5, 7, 1, True), (4, 9, 1, False)], dtype=np.int64)
    content, inputs = fill_columns(rows, tables, 5)
    assert inputs == StaticInputs(size=5, num_rows=3, samples=[0, 1], filters=True)
    assert len(content) == columns_size(5)
    integers = [content[start : start + 40].view(np.int64) for start in range(0, 240, 48)]
    slots, starts, destinations, seeds, top_k = (column.tolist() for column in integers)
    stride, nowhere = tables.token_stride, 6 * tables.token_stride + 1
    assert slots == [2, 5, 4, 6, 6]
    assert starts == [4, 7, 9, 0, 0]
    assert destinations == [2 * stride + 5, 5 * stride + 8, nowhere, nowhere, nowhere]
    assert seeds == [72, 75, 0, 0, 0]
    assert top_k == [3, 9, 0, 0, 0]
    floats = [content[start : start + 20].view(np.float32) for start in range(240, 336, 32)]
    temperature, top_p, log_min_p = (column.tolist() for column in floats)
    assert temperature == pytest.approx([0.0, 0.7, 0.0, 0.0, 0.0])
    assert top_p == pytest.approx([0.5, 0.9, 1.0, 1.0, 1.0])
    assert log_min_p == pytest.approx([-np.inf, np.log(0.1), -np.inf, -np.inf, -np.inf])


@pytest.mark.parametrize(("slot", "filters"), [(2, False), (4, False), (5, True)])
def test_greedy_rows_filter_nothing(slot: int, filters: bool) -> None:
    rows = np.array([(slot, 4, 1, True)], dtype=np.int64)
    _, inputs = fill_columns(rows, make_tables(), 1)
    assert inputs.filters == filters
    assert inputs.samples is None


def test_slots_take_turns_and_wait_for_their_last_step() -> None:
    journal: list[str] = []

    class Slot:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> bool:
            journal.append(f"wait {self.name}")
            return True

    ring = SlotRing([Slot("a"), Slot("b"), Slot("c")])
    assert [ring.take().name for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert journal == ["wait a", "wait b", "wait c", "wait a", "wait b"]


def test_staging_grows_in_powers_of_two() -> None:
    assert [staging_size(n) for n in (1, 65536, 65537, 1 << 20)] == [65536, 65536, 131072, 1 << 20]


def test_staged_arrays_arrive_whole_and_aligned() -> None:
    staging = Staging()
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([], dtype=np.float32),
        np.array([0.5], dtype=np.float32),
        np.arange(3, dtype=np.int64),
        np.array([7, 255], dtype=np.uint8),
    ]
    assert [staging.add(array) for array in arrays] == [0, 1, 2, 3, 4]
    found = staging.send(uploader_to(CPU))
    for array, tensor in zip(arrays, found, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    assert all((tensor.data_ptr() - found[0].data_ptr()) % 16 == 0 for tensor in found[2:])
