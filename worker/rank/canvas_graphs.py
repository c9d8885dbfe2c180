"""CUDA graphs of rounds of canvases: their sizes, capture and replay."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels import registry
from kernels.attention import AttentionBackend, CapturableBackend
from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank.batch import Batch, BatchBuilder
from worker.rank.graphs import Forward, GraphCapture, Replay, free_bytes
from worker.rank.speculation.base import Capture
from worker.rank.streams import DeviceStreams
from worker.rank.tables import DeviceTables

_MOST_TOKENS = 2048
"""Upper bound on the largest default size, in tokens: larger steps take longer to compute than to
launch."""


class CanvasGraphs:
    """Graphs of forward passes over different numbers of canvases, and the static buffers that they
    read.

    Args:
        forward: computes the hidden states of a batch.
        tables: tokens and pages of all slots.
        length: number of tokens per canvas.
        signal: [largest size * length, hidden]: buffer of the self-conditioning signal.
        sizes: sizes in canvases, ascending.
        capture: `GraphCapture`; tests on CPU pass a function that captures nothing.
    """

    def __init__(
        self,
        forward: Forward,
        tables: DeviceTables,
        length: int,
        signal: torch.Tensor,
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        self._run_model, self._length, self._sizes = forward, length, tuple(sizes)
        self._signal, self._hidden = signal, torch.zeros_like(signal)
        builder = BatchBuilder(tables)
        largest = builder.build_padding(sizes[-1], sizes[-1] * length).staged
        assert largest is not None, "graphs gather their inputs"
        self._rows = torch.empty_like(largest.packed)
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):  # the others reuse the memory of the largest
            padding = builder.build_padding(size, size * length)
            self._load(padding)
            assert padding.staged is not None, "graphs gather their inputs"
            rows = padding.staged.at(self._rows)
            signal = self._signal[: size * length]
            static = replace(padding, staged=rows, starts=rows["starts"], signal=signal)
            self._replays[size] = capture(partial(self._run, static))

    def close(self) -> None:
        """Drops all graphs, which must not outlive NCCL's group."""
        self._replays.clear()

    def size_for(self, count: int) -> int | None:
        """Size of the smallest graph that can run this many canvases; None if there is none."""
        if count > self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, count)]

    def forward(self, batch: Batch, signal: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] of a padded batch's canvases, given their signal [T, hidden];
        valid until the next forward pass."""
        assert batch.size is not None, "an eager step does not run on a graph"
        self._load(batch)
        self._signal[: len(signal)].copy_(signal)
        self._replays[batch.size]()
        return self._hidden[: len(signal)]

    def _load(self, batch: Batch) -> None:
        assert batch.staged is not None, "graphs gather their inputs"
        self._rows[: len(batch.staged.packed)].copy_(batch.staged.packed)

    def _run(self, batch: Batch) -> None:
        hidden = self._run_model(batch)
        self._hidden[: len(hidden)].copy_(hidden)


class CanvasCapture:
    """Captures the rounds of canvases on one rank after measuring the memory that graphs take.

    Args:
        sizes: sizes in canvases, ascending.
        streams: the rank's streams.
        model: the model's configuration.
        dtype: data type of hidden states.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        streams: DeviceStreams,
        model: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        self._sizes, self._streams = tuple(sizes), streams
        self._length, self._hidden_size, self._dtype = model.num_ahead, model.hidden_size, dtype

    def measure(self, forward: Forward, tables: DeviceTables) -> int:
        """Estimated bytes of device memory for all graphs, extrapolated from capturing the two
        largest, which are then dropped."""
        capture = GraphCapture(self._streams)
        graphs: list[CanvasGraphs] = []

        def taken_by(sizes: Sequence[int]) -> int:
            before = free_bytes(self._streams)
            graphs.append(self._graphs(forward, tables, sizes, capture))
            return max(0, before - free_bytes(self._streams))

        expected = taken_by(self._sizes[-1:])
        if len(self._sizes) > 1:
            expected += taken_by(self._sizes[-2:-1]) * (len(self._sizes) - 1)
        return expected

    def run(self, forward: Forward, tables: DeviceTables) -> CanvasGraphs:
        """Captures all graphs. Every rank must call this, since they contain collectives."""
        return self._graphs(forward, tables, self._sizes, GraphCapture(self._streams))

    def _graphs(
        self,
        forward: Forward,
        tables: DeviceTables,
        sizes: Sequence[int],
        capture: Callable[[Callable[[], None]], Replay],
    ) -> CanvasGraphs:
        shape = sizes[-1] * self._length, self._hidden_size
        signal = torch.zeros(shape, dtype=self._dtype, device=self._streams.device)
        return CanvasGraphs(forward, tables, self._length, signal, sizes, capture)


def create_canvas_capture(
    config: EngineConfig,
    group: TensorParallelGroup,
    streams: DeviceStreams | None,
    backend: AttentionBackend,
    model: ModelConfig,
    dtype: torch.dtype,
) -> CanvasCapture | None:
    """The capture of rounds of canvases; None for models without canvases, or if they run eagerly
    because of the configuration, collectives through the host, or the attention backend."""
    can_capture = registry.uses_triton(group.device) and not group.is_through_host
    if streams is None or config.execution.enforce_eager or not can_capture:
        return None
    if model.canvas is None:
        return None
    if not isinstance(backend, CapturableBackend) or not backend.captures_ragged:
        return None
    length, limits = model.canvas.length, config.scheduling
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens // length)
    sizes = config.execution.cudagraph_capture_sizes
    if not sizes:
        sizes = tuple(2**power for power in range(12) if 2**power * length <= _MOST_TOKENS)
    return CanvasCapture(sorted({min(size, most) for size in sizes or (1,)}), streams, model, dtype)
