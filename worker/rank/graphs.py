"""CUDA graphs of decode steps, and of passes over blocks: which sizes, how they are captured, and
how a step replays them."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.progress import MofNCompleteColumn

from kernels import registry
from worker.config import EngineConfig
from worker.models.tensor_parallel import TensorParallelGroup
from worker.plan.plan import Plan, Row
from worker.progress import progress
from worker.rank.device_inputs import prepare_blocks, prepare_static
from worker.rank.inputs import StepInputs
from worker.rank.sampling.masks import MaskRows
from worker.rank.static_blocks import StaticBlocks, num_blocks
from worker.rank.static_step import StaticInputs, StaticStep
from worker.rank.streams import DeviceStreams
from worker.rank.tables import DeviceTables
from worker.rank.transfer import Uploader

logger = logging.getLogger(__name__)

_LARGEST_DEFAULT = 512
"""Beyond so many rows a step computes longer than it takes to launch."""
_LARGEST_BLOCK_TOKENS = 2048
"""The same of a pass over blocks, whose rows are many tokens each."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Makes of a sequence of launches one that repeats them."""


def capture_sizes(config: EngineConfig, block_size: int = 1) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending; the engine's largest step is among them by default.

    Of a block-diffusion model a row is a block; a request may compute two in one pass, one to
    commit and one to decide.
    """
    most = config.max_num_seqs
    if block_size > 1:
        most = min(2 * most, max(1, _LARGEST_BLOCK_TOKENS // block_size))
    if config.cudagraph_capture_sizes:
        # Larger ones would never be full.
        return tuple(sorted({min(size, most) for size in config.cudagraph_capture_sizes}))
    limit = min(most, _LARGEST_DEFAULT)
    steps = (1, 2, 4, *range(8, 257, 8), *range(272, limit + 1, 16))
    return (*(size for size in steps if size < limit), limit)


class DecodeGraphs:
    """The forward pass and the draw of decode steps, captured at a few sizes.

    Args:
        step: what is captured.
        sizes: numbers of rows, ascending.
        capture: `GraphCapture`; a test on CPU passes its launches through.
        show_progress: whether to say how far it is.
    """

    def __init__(
        self, step: StaticStep, sizes: Sequence[int], capture: Capture, *, show_progress: bool
    ) -> None:
        self.step = step
        self._sizes = tuple(sizes)
        self._forward: dict[int, Replay] = {}
        self._sample: dict[tuple[int, bool], Replay] = {}
        shown = progress(
            "capturing CUDA graphs",
            len(self._sizes),
            amount=f"{len(self._sizes)} batch sizes",
            columns=(MofNCompleteColumn(),),
            show=show_progress,
        )
        with shown as advance:
            # The largest first: the others find room in its memory.
            for size in reversed(self._sizes):
                self._forward[size] = capture(partial(step.forward, size))
                for filters in (False, True):
                    launch = partial(step.sample, size, filters=filters)
                    self._sample[size, filters] = capture(launch)
                advance(1)

    def size_for(self, rows: Sequence[Row]) -> int | None:
        """The captured size that a step of these rows is padded to; None where none serves."""
        # Rows of one token come first.
        if not rows or rows[-1].length > 1 or len(rows) > self._sizes[-1]:
            return None
        if any(row.num_draws > 1 for row in rows):
            return None
        return self._sizes[bisect.bisect_left(self._sizes, len(rows))]

    def prepare(
        self, plan: Plan, tables: DeviceTables, size: int, uploader: Uploader
    ) -> tuple[StaticInputs, StepInputs | None]:
        """Applies the Plan's writes and loads its rows, padded to `size`: see `prepare_static`."""
        return prepare_static(plan, tables, self.step, size, uploader)

    def forward(self, inputs: StaticInputs) -> torch.Tensor:
        """Hidden states [R, hidden] of the rows that the static buffers hold."""
        self._forward[inputs.size]()
        return self.step.hidden[: inputs.num_rows]

    def sample(self, inputs: StaticInputs, masks: MaskRows | None) -> torch.Tensor:
        """Tokens [R] of these rows; rows that do not sample have some token too."""
        replay = self._sample[inputs.size, inputs.filters]
        if masks is None:
            replay()
        else:
            rows = self.step.set_masks(masks, inputs.samples)
            replay()
            self.step.reset_masks(rows)
        return self.step.tokens[: inputs.num_rows]


class BlockGraphs:
    """The forward pass of a few numbers of blocks. What is scored differs from round to round, so
    that is launched kernel by kernel.

    Args:
        step: what is captured.
        sizes: numbers of blocks, ascending.
        capture: as of DecodeGraphs.
        show_progress: whether to say how far it is.
    """

    def __init__(
        self, step: StaticBlocks, sizes: Sequence[int], capture: Capture, *, show_progress: bool
    ) -> None:
        self.step = step
        self._sizes = tuple(sizes)
        self._forward: dict[int, Replay] = {}
        shown = progress(
            "capturing CUDA graphs",
            len(self._sizes),
            amount=f"{len(self._sizes)} numbers of blocks",
            columns=(MofNCompleteColumn(),),
            show=show_progress,
        )
        with shown as advance:
            for size in reversed(self._sizes):
                self._forward[size] = capture(partial(step.forward, size))
                advance(1)

    def size_for(self, rows: Sequence[Row]) -> int | None:
        """The captured size that a pass over these rows is padded to; None where none serves."""
        count = num_blocks(rows, self.step.block_size)
        if not 0 < count <= self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, count)]

    def prepare(
        self, plan: Plan, tables: DeviceTables, size: int, uploader: Uploader
    ) -> tuple[StaticInputs, None]:
        """Applies the Plan's writes and loads its blocks, padded to `size`."""
        return prepare_blocks(plan, tables, self.step, size, uploader), None

    def forward(self, inputs: StaticInputs) -> torch.Tensor:
        """Hidden states of the blocks that the static buffers hold; valid until the next pass."""
        self._forward[inputs.size]()
        return self.step.hidden[: inputs.num_rows * self.step.block_size]


def create_graphs(
    step: StaticStep | StaticBlocks,
    sizes: Sequence[int],
    capture: Capture,
    *,
    show_progress: bool,
) -> DecodeGraphs | BlockGraphs:
    """The graphs of a step, by its kind."""
    if isinstance(step, StaticBlocks):
        return BlockGraphs(step, sizes, capture, show_progress=show_progress)
    return DecodeGraphs(step, sizes, capture, show_progress=show_progress)


class GraphCapture:
    """Captures launches on the compute stream. All graphs share one pool of memory.

    They may, since they run one after another and hand nothing on in it. Kernels are compiled and
    libraries set up by a run before each capture.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._stream = streams.compute
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Replay:
        """Captures what `launch` does; the replay does it again on the current stream."""
        launch()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (of the process group, say) may go on asking their events.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        return graph.replay


class DecodeCapture:
    """Captures the decode steps of one rank, after telling how much memory that will take.

    Args:
        sizes: numbers of rows, ascending.
        streams: of the rank.
        show_progress: whether to say anything.
    """

    def __init__(
        self, sizes: Sequence[int], streams: DeviceStreams, *, show_progress: bool
    ) -> None:
        self._sizes = tuple(sizes)
        self._streams = streams
        self._show_progress = show_progress
        self.expected = 0
        """Bytes that `measure` found."""

    def measure(self, step_of: Callable[[int], StaticStep | StaticBlocks]) -> int:
        """Device memory that all sizes will take, from capturing two and dropping them again.

        Args:
            step_of: makes the step and its buffers for so many rows.
        """
        capture = GraphCapture(self._streams)
        before = self._free_bytes()
        step = step_of(self._sizes[-1])
        graphs = [create_graphs(step, self._sizes[-1:], capture, show_progress=False)]
        self.expected = max(0, before - self._free_bytes())
        if len(self._sizes) > 1:
            before = self._free_bytes()
            graphs.append(create_graphs(step, self._sizes[-2:-1], capture, show_progress=False))
            each = max(0, before - self._free_bytes())
            self.expected += each * (len(self._sizes) - 1)
        return self.expected

    def run(
        self, step_of: Callable[[int], StaticStep | StaticBlocks]
    ) -> DecodeGraphs | BlockGraphs:
        """All graphs. Every rank must be at it, since they capture collectives."""
        before, start = self._free_bytes(), time.perf_counter()
        graphs = create_graphs(
            step_of(self._sizes[-1]),
            self._sizes,
            GraphCapture(self._streams),
            show_progress=self._show_progress,
        )
        if self._show_progress:
            logger.info(
                "captured steps of %d to %d rows (%d sizes) in %.1f s: %.2f GB, after %.2f "
                "GB were set aside",
                *(self._sizes[0], self._sizes[-1], len(self._sizes)),
                time.perf_counter() - start,
                (before - self._free_bytes()) / 1e9,
                self.expected / 1e9,
            )
        return graphs

    def _free_bytes(self) -> int:
        """Memory of the device that nobody holds, not even torch's cache."""
        torch.cuda.synchronize(self._streams.device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._streams.device)
        return free


def create_capture(
    config: EngineConfig,
    group: TensorParallelGroup,
    streams: DeviceStreams | None,
    block_size: int,
) -> DecodeCapture | None:
    """What captures a rank's steps; None where they are launched kernel by kernel."""
    if streams is None or not can_capture(config, group):
        return None
    sizes = capture_sizes(config, block_size)
    return DecodeCapture(sizes, streams, show_progress=group.rank == 0)


def can_capture(config: EngineConfig, group: TensorParallelGroup) -> bool:
    """Whether decode steps may be captured: not where their collectives wait on the host."""
    on_triton = registry.uses_triton(torch.empty(0, device=group.device))
    return on_triton and not config.enforce_eager and not group.is_through_host
