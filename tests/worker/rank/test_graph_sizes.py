"""Captured sizes of decode steps, their padding, and the rotation of slots and staging buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernels.attention import AttentionBackend, CapturableBackend
from worker.config import EngineConfig
from worker.models.config.canvas_config import CanvasConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import Admit, LogitsParams, Plan, PlannedRow
from worker.rank.batch import Batch, BatchBuilder
from worker.rank.canvas_graphs import CanvasCapture, create_canvas_capture
from worker.rank.graphs import (
    StepCapture,
    StepGraphs,
    capture_sizes,
    create_capture,
    token_capture_sizes,
)
from worker.rank.speculation.device_model import DeviceModelProposer
from worker.rank.streams import DeviceStreams, staging_size
from worker.rank.tables import DeviceTables
from worker.rank.transfer import send, uploader_to

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(max_num_seqs: int, *sizes: int) -> EngineConfig:
    return EngineConfig.of(model="m", max_num_seqs=max_num_seqs, cudagraph_capture_sizes=sizes)


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


def test_numbers_of_tokens_follow_from_what_a_token_computes() -> None:
    large = EngineConfig.of(model="m", max_num_batched_tokens=8192)
    sizes = token_capture_sizes(large, 1024)
    assert sizes[:8] == (1, 2, 4, 8, 16, 32, 64, 128)
    assert sizes[-3:] == (1792, 1920, 2048)
    assert sizes == tuple(sorted(set(sizes)))
    assert token_capture_sizes(large, 2048)[-2:] == (768, 896)
    assert token_capture_sizes(large, 4096)[-2:] == (448, 512)
    ranks = EngineConfig.of(model="m", max_num_batched_tokens=8192, tensor_parallel_size=4)
    assert token_capture_sizes(ranks, 4096)[-1] == 896


def test_steps_of_tokens_are_no_larger_than_there_can_be() -> None:
    small = EngineConfig.of(model="m", max_num_batched_tokens=100)
    assert token_capture_sizes(small, 1024) == (1, 2, 4, 8, 16, 32, 64, 100)
    given = EngineConfig.of(
        model="m", max_num_seqs=2, max_num_batched_tokens=100, cudagraph_capture_sizes=(64, 1, 256)
    )
    assert token_capture_sizes(given, 1024) == (1, 64, 100)
    assert capture_sizes(given) == (1, 2)


def make_tables(block_size: int = 1) -> DeviceTables:
    tables = DeviceTables(
        max_num_seqs=6,
        max_model_len=32,
        page_size=8,
        vocab_size=50,
        device=CPU,
        block_size=block_size,
    )
    for slot, sampling in ((2, (0.0, 3, 0.5)), (4, (0.7, 0, 1.0)), (5, (0.7, 9, 0.9))):
        tables.sampling.admit(Admit(slot, b"", *sampling, 0.1 if slot == 5 else 0.0, 70 + slot))
    return tables


class Recorder:
    """Records the calls of graphs, instead of a model."""

    def __init__(self) -> None:
        self.journal: list[tuple[str, int]] = []
        self.slots: list[int] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        assert batch.staged is not None
        self.slots = batch.staged["slots"].tolist()
        self.journal.append(("forward", len(batch.rows)))
        lengths = batch.staged["query_start"].diff()
        return batch.staged["slots"].repeat_interleave(lengths)[:, None].float()

    def compute_logits(self, hidden: torch.Tensor, _: object = None) -> torch.Tensor:
        self.journal.append(("logits", len(hidden)))
        return torch.nn.functional.one_hot(hidden[:, 0].long(), 50).float()


class Idle(CapturableBackend):
    """Attention that the recorder does not use."""

    def plan(self, metadata: Any) -> Any:
        raise AssertionError

    def prepare_for_capture(self, metadata: Any) -> Any:
        raise AssertionError


def make_graphs(
    tables: DeviceTables, sizes: tuple[int, ...], token_sizes: tuple[int, ...] = ()
) -> tuple[StepGraphs, Recorder, list[Callable[[], None]]]:
    recorder, captured = Recorder(), list[Callable[[], None]]()

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        captured.append(launch)
        launch()
        return launch

    steps = (recorder.forward, recorder.compute_logits)
    graphs = StepGraphs(
        *(*steps, tables, sizes, capture), token_sizes=token_sizes, show_progress=False
    )
    return graphs, recorder, captured


class Ragged(Idle):
    captures_ragged = True


class Uncaptured(AttentionBackend):
    def plan(self, metadata: Any) -> Any:
        raise AssertionError


def capture_of(
    backend: AttentionBackend,
    draft_backend: AttentionBackend | None = None,
    top_k: int = 1000,
    **options: Any,
) -> StepCapture | None:
    """Captures of a single rank on CUDA, with sparse attention in sequences longer than `top_k`."""
    model = SimpleNamespace(
        pooling=None,
        block_size=1,
        canvas=None,
        hidden_size=64,
        resolve_max_model_len=lambda requested: requested or 1000,
        selects_tokens_within=lambda length: length > top_k,
    )
    return create_capture(
        *(EngineConfig.of(model="m", max_num_seqs=4, max_num_batched_tokens=64, **options),),
        *(TensorParallelGroup.alone(torch.device("cuda")), cast("DeviceStreams", object())),
        *(backend, cast("ModelConfig", model)),
        draft_backend or backend,
    )


def test_selections_of_tokens_are_not_captured() -> None:
    """In sequences that are too short for selections, steps are captured."""
    assert capture_of(Ragged(), top_k=999) is None
    assert capture_of(Ragged(), top_k=999, max_model_len=999) is not None


def test_what_attention_can_be_captured_is() -> None:
    """Rows of any length only if all backends read their lengths on the device."""
    fixed, ragged = Idle(), Ragged()
    for backend, draft, has_tokens in (
        (fixed, None, False),
        (ragged, None, True),
        (ragged, fixed, False),
    ):
        capture = capture_of(backend, draft)
        assert capture is not None
        assert capture._sizes == (1, 2, 4)
        assert bool(capture._token_sizes) == has_tokens
    assert capture_of(Uncaptured()) is None
    assert capture_of(ragged, enforce_eager=True) is None


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 2, 4, 8)),
        ({"max_num_seqs": 3}, (1, 2, 3)),
        ({"max_num_batched_tokens": 512}, (1, 2)),
        ({"cudagraph_capture_sizes": (2, 100)}, (2, 16)),
        ({"enforce_eager": True}, None),
    ],
    ids=str,
)
def test_rounds_of_canvases_are_captured_up_to_2048_tokens(
    options: dict[str, Any], sizes: tuple[int, ...] | None
) -> None:
    model = SimpleNamespace(canvas=CanvasConfig(length=256), num_ahead=256, hidden_size=64)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, **options}

    def capture_with(backend: AttentionBackend) -> CanvasCapture | None:
        return create_canvas_capture(
            *(EngineConfig.of(model="m", **limits), TensorParallelGroup.alone(CUDA)),
            *(cast("DeviceStreams", object()), backend, cast("ModelConfig", model)),
            torch.bfloat16,
        )

    capture = capture_with(Ragged())
    assert (None if capture is None else capture._sizes) == sizes
    assert capture_with(Idle()) is None


class Captured:
    """A graph."""

    def __call__(self) -> None:
        pass


class Drafting:
    """A draft model, as used by graphs of steps."""

    def __init__(self) -> None:
        self.is_closed = False

    def prepare_capture(self, largest: int) -> None:
        pass

    def capture(self, size: int, capture: Callable[..., object]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def test_graphs_end_when_they_are_closed_whoever_holds_them() -> None:
    """Graphs of rows, tokens and samples, and of a draft model: NCCL's group ends after them."""
    recorder, drafting, made = Recorder(), Drafting(), list[weakref.ref[Captured]]()

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        graph = Captured()
        made.append(weakref.ref(graph))
        return graph

    held = StepGraphs(
        *(recorder.forward, recorder.compute_logits, make_tables(), (1, 2), capture),
        cast("DeviceModelProposer", drafting),
        token_sizes=(4,),
        show_progress=False,
    )
    assert [one() is not None for one in made] == 7 * [True]
    held.close()
    assert [one() is not None for one in made] == 7 * [False]
    assert drafting.is_closed


def test_a_step_replays_the_smallest_graph_that_holds_it() -> None:
    tables = make_tables()
    graphs, recorder, captured = make_graphs(tables, (1, 4, 8))
    assert recorder.journal[0] == ("forward", 8), "the largest takes its memory first"
    assert recorder.slots == [6], "it is captured on padding"
    assert len(captured) == 9
    decodes = [PlannedRow(slot, 9, 1, 1) for slot in range(9)]
    expected = {1: 1, 2: 4, 4: 4, 5: 8, 8: 8, 9: None}
    assert {count: graphs.size_for(decodes[:count]) for count in expected} == expected
    assert graphs.size_for([]) is None
    assert graphs.size_for([decodes[0], PlannedRow(7, 0, 2, 1)]) is None
    recorder.journal.clear()
    rows = [PlannedRow(2, 4, 1, 1), PlannedRow(4, 9, 1, 0), PlannedRow(0, 7, 1, 1)]
    batch = BatchBuilder(tables).build(Plan(1, [], [], rows), size=4)
    assert batch is not None
    assert graphs.forward(batch).flatten().tolist() == [2.0, 4.0, 0.0]
    assert graphs.sample(batch, None).tolist() == [2, 4, 0]
    assert recorder.journal == [("forward", 4), ("logits", 4)]
    assert tables.token_pool[[2, 4, 0, 6], [5, 10, 8, 1]].tolist() == [2, 0, 0, 6]


def test_steps_of_any_lengths_replay_graphs_by_their_tokens() -> None:
    tables = make_tables()
    graphs, recorder, captured = make_graphs(tables, (1, 2), (4, 16, 300))
    assert recorder.journal[:2] == [("forward", 7), ("forward", 5)], "7 rows cannot hold 300 tokens"
    assert len(captured) == 2 + 6
    prompt, draft, decode = (PlannedRow(2, 3, n, 1) for n in (9, 3, 1))
    assert graphs.tokens_for([decode, draft]) == (5, 4)
    assert graphs.tokens_for([draft, draft]) == (7, 16)
    assert graphs.tokens_for([prompt, prompt]) is None
    assert graphs.tokens_for([]) is None
    assert graphs.tokens_for([decode, decode]) == (5, 4), "those with drafts may have found none"
    assert graphs.tokens_for([decode] * 3) is None, "more decodes than are captured are eager"
    assert make_graphs(tables, (1, 2))[0].tokens_for([draft]) is None

    recorder.journal.clear()
    rows = [PlannedRow(2, 4, 1, 1), PlannedRow(5, 0, 9, 0), PlannedRow(4, 3, 2, 1)]
    size, num_tokens = graphs.tokens_for(rows) or (0, 0)
    batch = BatchBuilder(tables).build(Plan(1, [], [], rows), size=size, num_tokens=num_tokens)
    assert batch is not None
    assert graphs.forward(batch).flatten().tolist() == [2.0, *[5.0] * 9, *[4.0] * 2]
    assert recorder.journal == [("forward", 7)]
    assert recorder.slots == [2, 5, 4, 6, 6, 6, 6]
    assert batch.rows[:, 2].tolist() == [1, 9, 2, 1, 1, 1, 1]
    assert batch.num_decodes == 0, "the device alone knows which rows are"
    sampling = batch.sampling
    assert sampling is not None
    assert sampling.tokens is not None
    assert (sampling.is_captured, sampling.tokens.tolist()) == (False, [0, 11])


def test_blocks_are_captured_two_by_request_and_not_beyond_what_launching_costs() -> None:
    assert capture_sizes(config(1), 8) == (1, 2)
    assert capture_sizes(config(4), 8) == (1, 2, 4, 8)
    assert capture_sizes(config(400), 32)[-1] == 64
    assert capture_sizes(config(400, 3, 700), 32) == (3, 64)


def test_a_pass_over_blocks_is_padded_with_the_dummy_slot() -> None:
    tables = make_tables(block_size=4)
    rows = [PlannedRow(2, 8, 4, 1), PlannedRow(5, 4, 12, 1)]
    batch = BatchBuilder(tables).build(Plan(1, [], [], rows), size=6)
    assert batch is not None
    assert batch.rows[:, 0].tolist() == [2, 5, 5, 5, 6, 6]
    assert batch.rows[:, 1].tolist() == [8, 4, 8, 12, 0, 0]
    assert (batch.num_rows, batch.sampling, batch.num_decodes) == (4, None, 0)
    assert batch.staged is not None
    assert batch.staged["query_start"].tolist() == [0, 4, 8, 12, 16, 20, 24]
    graphs, recorder, _ = make_graphs(tables, (1, 2))
    recorder.journal.clear()
    assert graphs.size_for(rows[:1]) == 1
    assert graphs.size_for([rows[0], rows[0]]) == 2
    assert graphs.size_for(rows) is None
    assert graphs.size_for([]) is None
    one = BatchBuilder(tables).build(Plan(2, [], [], rows[:1]), size=2)
    assert one is not None
    assert graphs.forward(one).shape == (4, 1)
    assert recorder.journal == [("forward", 2)]


def test_padded_batches_draw_for_every_row() -> None:
    tables = make_tables()
    rows = [PlannedRow(2, 4, 1, 1), PlannedRow(5, 7, 1, 1), PlannedRow(4, 9, 1, 0)]
    batch = BatchBuilder(tables).build(Plan(1, [], [], rows), size=5)
    assert batch is not None
    assert batch.staged is not None
    assert batch.staged["slots"].tolist() == [2, 5, 4, 6, 6]
    assert batch.staged["starts"].tolist() == [4, 7, 9, 0, 0]
    assert batch.ends == [32] * 5
    sampling = batch.sampling
    assert sampling is not None
    assert (sampling.is_captured, sampling.sampled_rows) == (True, [0, 1])
    assert sampling.filters == ("top_k", "top_p", "log_min_p")
    staged = sampling.staged
    stride, nowhere = tables.token_stride, 6 * tables.token_stride + 1
    assert staged["destinations"].tolist() == [2 * stride + 5, 5 * stride + 8, *[nowhere] * 3]
    assert staged["positions"][:2].tolist() == [5, 8]
    assert staged["seeds"].tolist() == [72, 75, 0, 0, 0]
    assert staged["top_k"].tolist() == [0, 9, 0, 0, 0]
    assert staged["temperature"].tolist() == pytest.approx([0.0, 0.7, 0.0, 0.0, 0.0])
    assert staged["top_p"].tolist() == pytest.approx([1.0, 0.9, 1.0, 1.0, 1.0])
    log_min_p = [-np.inf, np.log(0.1), *[-np.inf] * 3]
    assert staged["log_min_p"].tolist() == pytest.approx(log_min_p)


def test_rows_with_rules_draw_outside_of_the_graph() -> None:
    tables = make_tables()
    admit = Admit(1, b"", 0.0, 0, 1.0, 0.0, 0, LogitsParams(1, num_logprobs=1))
    rows = [PlannedRow(2, 4, 1, 0), PlannedRow(1, 7, 1, 1)]
    batch = BatchBuilder(tables).build(Plan(1, [admit], [], rows), size=4)
    assert batch is not None
    assert (len(batch.rows), batch.num_rows) == (4, 2)
    sampling = batch.sampling
    assert sampling is not None
    assert (sampling.is_captured, sampling.num_samples) == (False, 1)
    assert sampling.tokens is not None
    assert sampling.tokens.tolist() == [1]


def test_staging_grows_in_powers_of_two() -> None:
    assert [staging_size(n) for n in (1, 65536, 65537, 1 << 20)] == [65536, 65536, 131072, 1 << 20]


def test_staged_arrays_arrive_whole_and_aligned() -> None:
    groups = [
        {"a": np.arange(5, dtype=np.int32), "none": np.array([], dtype=np.float32)},
        {
            "b": np.array([0.5], dtype=np.float32),
            "c": np.arange(3, dtype=np.int64),
            "d": np.array([7, 255], dtype=np.uint8),
        },
    ]
    found = send(groups, uploader_to(CPU))
    for group, staged in zip(groups, found, strict=True):
        copied = staged.at(staged.packed.clone())
        for name, array in group.items():
            for tensor in (staged[name], copied[name]):
                assert np.array_equal(tensor.numpy(), array)
                assert tensor.numpy().dtype == array.dtype
            assert (staged[name].data_ptr() - found[0].packed.data_ptr()) % 16 == 0
        assert "e" not in staged.kinds
