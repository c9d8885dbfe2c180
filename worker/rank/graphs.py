"""CUDA graphs of small steps: their sizes, capture and replay."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.progress import MofNCompleteColumn

from kernels import (
    SamplingParameters,
    TokenCells,
    apply_token_bitmask,
    registry,
    sample_tokens,
)
from kernels.attention import AttentionBackend, CapturableBackend
from kernels.lora import LoraTiles
from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import Row
from worker.progress import Advance, progress
from worker.rank.adapter_rows import adapter_tiles
from worker.rank.batch import Batch, BatchBuilder
from worker.rank.sampling.masks import MaskRows
from worker.rank.sampling.state import FILTERS, staged_parameters
from worker.rank.speculation.base import Capture
from worker.rank.speculation.device_model import DeviceModelProposer
from worker.rank.speculation.heads import HeadProposer
from worker.rank.streams import DeviceStreams
from worker.rank.tables import DeviceTables
from worker.rank.transfer import StagedArrays

logger = logging.getLogger(__name__)

_LARGEST_DEFAULT = 512
"""Largest default size, in rows: larger steps take longer to compute than to launch."""
_MOST_TOKENS = 2048
"""Upper bound on the largest default size, in tokens."""
_LAYER_FLOP = 1e11
"""Estimated floating-point operations that a layer can compute while its kernels are launched. On
an H100, launching attention took 29 us and launching a norm 24 us, so launching the 9 kernels of a
layer takes about 150 us. In that time, the device performs 1e11 operations at the 550 to 650
TFLOP/s of long prompts."""
_TILE_TOKENS = 64
"""Tokens per matmul tile: fewer take as long, since reading the weights dominates."""

Replay = Callable[[], None]
Forward = Callable[[Batch], torch.Tensor]
"""Computes the hidden states [T, hidden] of a batch's tokens."""
ComputeLogits = Callable[[torch.Tensor, LoraTiles | None], torch.Tensor]
"""Computes fp32 logits [S, vocab] from hidden states [S, hidden] and the rows' LoRA tiles (None if
no row has an adapter)."""
Drafts = DeviceModelProposer | HeadProposer


def capture_sizes(config: EngineConfig, block_size: int = 1) -> tuple[int, ...]:
    """Sizes, in rows, for which graphs are captured, ascending.

    The default ends with the maximum number of rows of a step, at most 512. Rows of a
    block-diffusion model are blocks; a request may compute two in one pass: one to commit and one
    to decide.
    """
    most = config.scheduling.max_num_seqs
    if block_size > 1:
        most = min(2 * most, max(1, _MOST_TOKENS // block_size))
    if config.execution.cudagraph_capture_sizes:
        # No step has more rows than `most`.
        return tuple(sorted({min(size, most) for size in config.execution.cudagraph_capture_sizes}))
    limit = min(most, _LARGEST_DEFAULT)
    steps = (1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16))
    return (*(size for size in steps if size < limit), limit)


def token_capture_sizes(config: EngineConfig, hidden_size: int) -> tuple[int, ...]:
    """Sizes, in tokens, for which graphs with rows of any length are captured, ascending.

    Args:
        config: the engine's configuration.
        hidden_size: the model's hidden size, to estimate operations per token.
    """
    most = config.scheduling.max_num_batched_tokens
    if config.execution.cudagraph_capture_sizes:
        sizes = config.execution.cudagraph_capture_sizes
        return tuple(sorted({min(size, most) for size in sizes}))
    # A layer with Llama's proportions has about 13 * hidden_size ** 2 weights, with two operations
    # per token each.
    flop = 26 * hidden_size**2 / config.tensor_parallel_size
    largest = min(_MOST_TOKENS, max(_LARGEST_DEFAULT, int(_LAYER_FLOP / flop)))
    limit = min(most, largest // _TILE_TOKENS * _TILE_TOKENS)
    tile = _TILE_TOKENS
    steps = (
        *(1, 2, 4, 8, 16, 32),
        *range(tile, _LARGEST_DEFAULT, tile),
        *range(_LARGEST_DEFAULT, limit + 1, 2 * tile),
    )
    return (*(size for size in steps if size < limit), limit)


class StepGraphs:
    """Graphs of small steps, and the static buffers that they read.

    For steps with one token per row, the forward pass and sampling are captured for several numbers
    of rows. For steps with longer rows (prompts, drafts), only the forward pass is captured, for
    several numbers of tokens; row lengths are data on the device. For block-diffusion models, whose
    rows are blocks, only the forward pass is captured as well, since the sampled positions vary
    between rounds.

    If LoRA is enabled, forward passes are captured twice, with and without adapters, so that steps
    without adapters launch no LoRA kernels.

    Graphs assume that each row may be as long as the tables allow, so the number of attention
    splits depends only on the number of rows.

    Args:
        forward: computes the hidden states of a batch.
        compute_logits: computes logits from hidden states, with the LM head's adapters.
        tables: tokens, pages and sampling parameters of all slots.
        sizes: sizes in rows, ascending.
        capture: `GraphCapture`; tests on CPU pass a function that captures nothing.
        drafts: proposer with a draft model or a head, whose passes are captured at the same sizes;
            None if there is none.
        token_sizes: sizes in tokens, ascending, for steps whose rows may have any length.
        show_progress: whether to show a progress bar.
    """

    def __init__(
        self,
        forward: Forward,
        compute_logits: ComputeLogits,
        tables: DeviceTables,
        sizes: Sequence[int],
        capture: Capture,
        drafts: Drafts | None = None,
        *,
        token_sizes: Sequence[int] = (),
        show_progress: bool,
    ) -> None:
        self._run_model = forward
        self._compute_logits = compute_logits
        self._tables = tables
        self._drafts = drafts
        # Sizes, except those that rows cannot fill because requests are short.
        self._sizes = tuple(sizes)
        self._token_sizes = [
            size for size in token_sizes if size <= self._num_rows(size) * tables.max_model_len
        ]
        self._row_tokens = tables.block_size
        # Static buffers: row arrays, sampling arrays, sampled tokens, masks.
        builder = BatchBuilder(tables)
        self._variants = (True, False) if tables.max_loras else (False,)
        """Whether tokens have adapters, for each variant of forward passes to capture."""
        most = self._variants[0]
        largest = builder.build_padding(self._sizes[-1], has_adapters=most)
        self._rows = _like(largest.staged)
        if self._token_sizes:
            size = self._token_sizes[-1]
            staged = builder.build_padding(self._num_rows(size), size, has_adapters=most).staged
            self._rows = max(self._rows, _like(staged), key=len)
        self._samples = None if largest.sampling is None else _like(largest.sampling.staged)
        self._hidden: torch.Tensor | None = None
        self._tokens = torch.zeros(sizes[-1], dtype=torch.int64, device=tables.device)
        words = -(-tables.vocab_size // 32)
        self._masks = torch.full((sizes[-1], words), -1, dtype=torch.int32, device=tables.device)
        if drafts is not None:
            drafts.prepare_capture(self._sizes[-1])
        # Graphs by size, the largest first: the others reuse its memory pool.
        self._forward: dict[tuple[int, bool], Replay] = {}
        """Forward graphs by size and whether tokens have adapters."""
        self._ragged: dict[tuple[int, bool], Replay] = {}
        """Forward graphs with rows of any length, by size in tokens and whether tokens have
        adapters."""
        self._sample: dict[tuple[int, bool, bool], Replay] = {}
        """Sampling graphs by size, whether samples are filtered, and whether the LM head has
        adapters."""
        num_sizes = len(self._token_sizes) + len(self._sizes)
        shown = progress(
            "capturing CUDA graphs",
            num_sizes,
            amount=f"{num_sizes} batch sizes",
            columns=(MofNCompleteColumn(),),
            show=show_progress,
        )
        with shown as advance:
            self._capture_all(builder, capture, advance)

    def close(self) -> None:
        """Drops all graphs even if this object is still referenced: they must not outlive NCCL's
        group."""
        self._forward.clear()
        self._ragged.clear()
        self._sample.clear()
        if self._drafts is not None:
            self._drafts.close()

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in a graph whose rows have one token, or one block, each."""
        return self._sizes[-1]

    def size_for(self, rows: Sequence[Row]) -> int | None:
        """Number of rows to which a step with the rows `rows` is padded; None if no graph can run
        it."""
        count = captured_rows(rows, self._row_tokens)
        if not 0 < count <= self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, count)]

    def tokens_for(self, rows: Sequence[Row]) -> tuple[int, int] | None:
        """The numbers of rows and tokens to which a step with rows of any length is padded. None if
        no graph can run it, or if all its rows have one token and are too many for `size_for`: such
        a step runs eagerly, since it takes longer to compute than to launch."""
        sizes, count = self._token_sizes, sum(row.length for row in rows)
        if not sizes or not 0 < count <= sizes[-1]:
            return None
        if captured_rows(rows, 1) > self._sizes[-1]:
            return None
        num_tokens = sizes[bisect.bisect_left(sizes, count)]
        num_rows = self._num_rows(num_tokens)
        room = (num_rows - len(rows)) * self._tables.max_model_len
        return (num_rows, num_tokens) if num_tokens - count <= room else None

    def _num_rows(self, num_tokens: int) -> int:
        """Number of rows of a graph with `num_tokens` tokens: at most one per token, plus one for
        padding."""
        return 1 + min(num_tokens, self._tables.dummy_slot)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of a padded batch's tokens without padding; valid until the
        next forward pass."""
        assert batch.size is not None, "an eager step does not run on a graph"
        self._load(batch)
        assert batch.staged is not None, "graphs gather their inputs"
        if batch.num_tokens:
            return self._forward_ragged(batch, batch.staged)
        self._forward[batch.size, batch.has_adapters]()
        assert self._hidden is not None, "a replay makes hidden states"
        return self._hidden[: batch.num_rows * self._row_tokens]

    def _forward_ragged(self, batch: Batch, staged: StagedArrays) -> torch.Tensor:
        speculative = None if batch.sampling is None else batch.sampling.speculative
        if speculative is not None and speculative.on_device is not None:
            assert batch.starts is not None, "starts are on the device"
            staged.at(self._rows)["starts"].copy_(batch.starts)
        self._ragged[batch.num_tokens, batch.has_adapters]()
        assert self._hidden is not None, "a replay makes hidden states"
        return self._hidden[: int(batch.rows[: batch.num_rows, 2].sum())]

    def sample(self, batch: Batch, masks: MaskRows | None) -> torch.Tensor:
        """Sampled tokens [R] of the batch's rows, after their forward pass; those of rows that do
        not sample are meaningless."""
        sampling = batch.sampling
        assert batch.size is not None, "an eager step does not run on a graph"
        assert sampling is not None, "captured sampling covers all rows"
        has_adapters = batch.has_adapters and self._tables.adapts_logits
        replay = self._sample[batch.size, bool(sampling.filters), has_adapters]
        if masks is None:
            replay()
        else:
            sampled_rows = sampling.sampled_rows
            rows = masks.rows if sampled_rows is None else masks.rows_among(sampled_rows)
            self._masks.index_copy_(0, rows, masks.bitmask)
            replay()
            self._masks.index_fill_(0, rows, -1)
        return self._tokens[: batch.num_rows]

    def _load(self, batch: Batch) -> None:
        """Copies the batch's arrays to the static buffers."""
        assert batch.staged is not None, "graphs gather their inputs"
        self._rows[: len(batch.staged.packed)].copy_(batch.staged.packed)
        if batch.sampling is not None and batch.sampling.is_captured:
            assert self._samples is not None, "captured sampling covers all rows"
            assert batch.sampling.staged is not None, "graphs read arrays on the device"
            packed = batch.sampling.staged.packed
            self._samples[: len(packed)].copy_(packed)

    def _capture_all(self, builder: BatchBuilder, capture: Capture, advance: Advance) -> None:
        """Captures all sizes; calls `advance` after each."""
        for size in reversed(self._token_sizes):
            for variant in self._variants:
                padding = builder.build_padding(self._num_rows(size), size, has_adapters=variant)
                self._ragged[size, variant] = self._captured_forward(padding, capture)
            advance(1)
        for size in reversed(self._sizes):
            for variant in self._variants:
                padding = builder.build_padding(size, has_adapters=variant)
                self._forward[size, variant] = self._captured_forward(padding, capture)
                if self._tables.adapts_logits or not variant:
                    self._capture_sampling(padding, capture)
            if self._drafts is not None:
                self._drafts.capture(size, capture)
            advance(1)

    def _capture_sampling(self, padding: Batch, capture: Capture) -> None:
        """Captures sampling, after a forward pass of the size of `padding`, a batch of dummy
        rows."""
        size, sampling = padding.size, padding.sampling
        assert size is not None, "padding has a size"
        if sampling is None:
            return
        assert self._samples is not None
        assert sampling.staged is not None, "graphs read arrays on the device"
        samples = sampling.staged.at(self._samples)
        cells = TokenCells(self._tables.flat_tokens, samples["destinations"])
        rows: StagedArrays | None = None
        if padding.has_adapters:
            assert padding.staged is not None, "graphs gather their inputs"
            rows = padding.staged.at(self._rows)
        for filters in ((), FILTERS):
            parameters = staged_parameters(
                samples, samples["positions"], filters, self._tables.vocab_size
            )
            launch = partial(self._run_sample, size, parameters, cells, rows)
            self._sample[size, bool(filters), padding.has_adapters] = capture(launch)

    def _captured_forward(self, padding: Batch, capture: Capture) -> Replay:
        """The forward pass captured for the size of `padding`, a batch of dummy rows."""
        self._load(padding)
        assert padding.staged is not None, "graphs gather their inputs"
        rows = padding.staged.at(self._rows)
        static = replace(padding, staged=rows, starts=rows["starts"])
        replay = capture(partial(self._run_forward, static))
        if isinstance(self._drafts, HeadProposer):
            assert self._hidden is not None, "a capture makes hidden states"
            hidden = self._hidden[: int(padding.rows[:, 2].sum())]
            self._drafts.capture_follow(static, hidden, capture)
        return replay

    def _run_forward(self, batch: Batch) -> None:
        hidden = self._run_model(batch)
        if self._hidden is None:
            most = max(self._sizes[-1] * self._row_tokens, *self._token_sizes, 1)
            self._hidden = hidden.new_zeros(most, hidden.shape[1])
        self._hidden[: len(hidden)].copy_(hidden)

    def _run_sample(
        self,
        size: int,
        parameters: SamplingParameters,
        cells: TokenCells,
        rows: StagedArrays | None,
    ) -> None:
        """Samples one token for each row and writes it to the token buffer and the token pool.
        `rows` has the LoRA adapters of the rows, each of which is one token."""
        assert self._hidden is not None, "sampling follows a forward pass"
        tiles = None if rows is None else adapter_tiles(rows)
        logits = self._compute_logits(self._hidden[:size], tiles)
        apply_token_bitmask(logits, self._masks[:size])
        sample_tokens(logits, parameters, self._tokens[:size], cells)


def captured_rows(rows: Sequence[Row], row_tokens: int) -> int:
    """Number of graph rows that the rows of a Plan take; 0 if no graph can run them.

    Args:
        rows: the Plan's rows.
        row_tokens: tokens per graph row: 1, or the block size. If it is 1, all rows must have one
            token and sample at most one.
    """
    if row_tokens > 1:
        return sum(row.length for row in rows) // row_tokens
    # Rows with one token come first.
    if not rows or rows[-1].length > 1 or any(row.num_samples > 1 for row in rows):
        return 0
    return len(rows)


def _like(staged: StagedArrays | None) -> torch.Tensor:
    assert staged is not None, "graphs gather their inputs"
    return torch.empty_like(staged.packed)


class GraphCapture:
    """Captures launches on the compute stream. All graphs share one memory pool.

    Sharing is safe: graphs run one after another and exchange no data through the pool. Each
    capture follows an eager run, which compiles kernels and initializes libraries.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._stream = streams.compute
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Replay:
        """Captures what `launch` launches; returns a function that replays it on the current
        stream."""
        launch()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the process group's, may query events during the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        return graph.replay


class StepCapture:
    """Captures the small steps of one rank after measuring the memory that graphs take.

    Args:
        sizes: sizes in rows, ascending.
        token_sizes: sizes in tokens, ascending; may be empty.
        streams: the rank's streams.
        show_progress: whether to show a progress bar and log the result.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        token_sizes: Sequence[int],
        streams: DeviceStreams,
        *,
        show_progress: bool,
    ) -> None:
        self._sizes = tuple(sizes)
        self._token_sizes = tuple(token_sizes)
        self._streams = streams
        self._show_progress = show_progress
        self.expected = 0
        """Estimated bytes of device memory for all graphs; 0 before `measure`."""

    def measure(
        self,
        forward: Forward,
        compute_logits: ComputeLogits,
        tables: DeviceTables,
        drafts: Drafts | None,
    ) -> int:
        """Estimated bytes of device memory for all graphs, extrapolated from capturing the two
        largest of each kind, which are then dropped."""
        capture = GraphCapture(self._streams)
        graphs: list[StepGraphs] = []

        def taken_by(sizes: Sequence[int], token_sizes: Sequence[int]) -> int:
            before = free_bytes(self._streams)
            steps = (forward, compute_logits, tables, sizes, capture, drafts)
            graphs.append(StepGraphs(*steps, token_sizes=token_sizes, show_progress=False))
            return max(0, before - free_bytes(self._streams))

        self.expected = taken_by(self._sizes[-1:], self._token_sizes[-1:])
        further = max(len(self._sizes), len(self._token_sizes)) - 1
        if further > 0:
            # One graph of each kind at a time, as if both kinds had the same number of sizes.
            second = (sizes[-2:-1] or sizes for sizes in (self._sizes, self._token_sizes))
            self.expected += taken_by(*second) * further
        return self.expected

    def run(
        self,
        forward: Forward,
        compute_logits: ComputeLogits,
        tables: DeviceTables,
        drafts: Drafts | None,
    ) -> StepGraphs:
        """Captures all graphs. Every rank must call this, since they contain collectives."""
        before, start = free_bytes(self._streams), time.perf_counter()
        graphs = StepGraphs(
            forward,
            compute_logits,
            tables,
            self._sizes,
            GraphCapture(self._streams),
            drafts,
            token_sizes=self._token_sizes,
            show_progress=self._show_progress,
        )
        if self._show_progress:
            logger.info(
                "captured CUDA graphs for up to %d rows (%d sizes) and %d tokens (%d sizes) in "
                "%.1f s: %.2f GB used, %.2f GB reserved",
                *(self._sizes[-1], len(self._sizes)),
                *(max(self._token_sizes, default=0), len(self._token_sizes)),
                time.perf_counter() - start,
                (before - free_bytes(self._streams)) / 1e9,
                self.expected / 1e9,
            )
        return graphs


def free_bytes(streams: DeviceStreams) -> int:
    """Free device memory in bytes, after torch's allocator has released its cache."""
    torch.cuda.synchronize(streams.device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(streams.device)
    return free


def create_capture(
    config: EngineConfig,
    group: TensorParallelGroup,
    streams: DeviceStreams | None,
    backend: AttentionBackend,
    model: ModelConfig,
    draft_backend: AttentionBackend,
) -> StepCapture | None:
    """The capture of a rank's steps; None if all steps run eagerly because of the configuration,
    collectives through the host, canvases, sparse attention, pooling, or an attention backend that
    cannot be captured.

    Args:
        config: the engine's configuration.
        group: the rank's tensor-parallel group.
        streams: the rank's streams; None on CPU.
        backend: attention backend.
        model: the model's configuration.
        draft_backend: attention backend of a draft model on the device or of a head that drafts;
            `backend` if there is neither.
    """
    can_capture = registry.uses_triton(group.device) and not group.is_through_host
    if streams is None or config.execution.enforce_eager or not can_capture:
        return None
    if not isinstance(backend, CapturableBackend) or model.pooling is not None:
        return None
    if model.canvas is not None:
        return None  # only canvas rounds are captured: `create_canvas_capture`
    if model.selects_tokens_within(model.resolve_max_model_len(config.max_model_len)):
        return None  # kernels depend on the lengths of rows
    sizes = capture_sizes(config, model.block_size)
    token_sizes: Sequence[int] = ()
    captured = [one for one in (backend, draft_backend) if isinstance(one, CapturableBackend)]
    if model.block_size == 1 and all(one.captures_ragged for one in captured):
        token_sizes = token_capture_sizes(config, model.hidden_size)
    return StepCapture(sizes, token_sizes, streams, show_progress=group.rank == 0)
