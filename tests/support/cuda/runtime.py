"""torch.cuda as the sources use it, on clocks; a kernel is one launch, and computes on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

from kernels.attention import AttentionMetadata, triton_backend
from kernels.attention.triton_decode import VisibleRows
from kernels.registry import Op
from tests.support.cuda.clocks import Event, Graph, Lane, World
from tests.support.cuda.tensors import Memory, patched_tensors

P = ParamSpec("P")
R = TypeVar("R")
_TOTAL = 80 << 30


@contextmanager
def pretended_cuda() -> Iterator[World]:
    """Inside, there is one CUDA device for each thread that enters `World.rank`."""
    world = World()
    with pytest.MonkeyPatch.context() as patch, patched_tensors():
        for name, value in _runtime(world).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Op, "select", _select(world, Op.select))
        for name, function in (
            ("attend_in_splits", _decode),
            ("attend_in_fixed_splits", _decode),
            ("extend_attention", _extend),
        ):
            patch.setattr(triton_backend, name, _as_launch(world, name, function))
        try:
            yield world
        finally:
            world.is_over = True


def _runtime(world: World) -> dict[str, Any]:
    properties = SimpleNamespace(
        name="a stand-in", major=9, minor=0, multi_processor_count=132, uuid="GPU-0"
    )

    @contextmanager
    def graph(made: Graph, *, stream: Lane, **_: Any) -> Iterator[None]:
        with world.clocks.on(stream):
            made.begin(stream)
            try:
                yield
            finally:
                made.end()

    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda **_: True,
        "get_device_properties": lambda _: properties,
        "Stream": lambda *_, **__: world.clocks.stream(),
        "Event": lambda enable_timing=False, **_: Event(world.clocks, enable_timing=enable_timing),
        "stream": lambda lane: world.clocks.on(lane),
        "current_stream": lambda *_: world.clocks.current,
        "synchronize": lambda *_: world.clocks.synchronize(),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 1 << 20,
        "memory_reserved": lambda *_: 1 << 20,
        "mem_get_info": lambda *_: (_TOTAL, _TOTAL),
        "graph_pool_handle": object,
        "CUDAGraph": lambda: Graph(world.clocks),
        "graph": graph,
        "cudart": lambda: _Cudart(world),
    }


class _Cudart:
    def __init__(self, world: World) -> None:
        self._world = world

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        self._world.stand_in.pinned[address] = Memory(num_bytes, is_pinned=True)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def _select(world: World, select: Callable[..., Any]) -> Callable[..., Any]:
    def selected(op: Any, tensor: torch.Tensor) -> Any:
        if not tensor.is_cuda:
            return select(op, tensor)
        return _as_launch(world, op.name, op.reference)

    return selected


def _as_launch(world: World, name: str, function: Callable[P, R]) -> Callable[P, R]:
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = world.stand_in.opaque(name, function, args, kwargs)
        return result

    return launch


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: VisibleRows,
    most_visible: int,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of single queries, row by row, reading just the pages that each sees."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    for index, visible in enumerate(rows.visible_lens.tolist()):
        row = index if rows.page_rows is None else int(rows.page_rows[index])
        first = max(0, visible - rows.window) if rows.window else 0
        if visible > first:
            keys = _gather(k_cache, rows.page_table[row], first, visible)
            values = _gather(v_cache, rows.page_table[row], first, visible)
            hidden = torch.zeros(1, visible - first, dtype=torch.bool)
            out[index] = _attend(q[index : index + 1], keys, values, hidden, scale, cap, sinks)[0]
    return out


def _extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of rows of queries, row by row."""
    assert metadata.query_start is not None
    out = torch.zeros(q.shape, dtype=q.dtype)
    starts = metadata.query_start.tolist()
    for row, length in enumerate(metadata.seq_lens.tolist()):
        start, stop = starts[row : row + 2]
        query = torch.arange(length - (stop - start), length)
        first = max(0, int(query[0]) + 1 - metadata.window) if metadata.window else 0
        position = torch.arange(first, length)
        size = metadata.block_size
        hidden = position[None] >= (query[:, None] // size + 1) * size
        if metadata.window:
            hidden |= position[None] <= query[:, None] - metadata.window
        keys = _gather(k_cache, metadata.page_table[row], first, length)
        values = _gather(v_cache, metadata.page_table[row], first, length)
        out[start:stop] = _attend(q[start:stop], keys, values, hidden, scale, cap, sinks)
    return out


def _gather(cache: torch.Tensor, pages: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Keys or values of positions [first, stop): [n, heads, head_dim]."""
    size = cache.shape[1]
    position = torch.arange(first, stop)
    slots = pages[position // size].long() * size + position % size
    return cache.flatten(0, 1).index_select(0, slots)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = (one.float().repeat_interleave(group, dim=1) for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(hidden[None], float("-inf"))
    if sinks is not None:
        own = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, own), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
