"""Fake of torch.cuda on clocks; each kernel is one launch, and computes on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

from kernels.attention import AttentionMetadata, triton_backend
from kernels.attention.triton_config import AttentionBlocks
from kernels.attention.triton_schedule import AttentionRows, Schedule
from kernels.registry import Op, registry
from tests.support.cuda.clocks import Event, Graph, Lane, World
from tests.support.cuda.tensors import Memory, patched_tensors
from worker.rank import runner

P = ParamSpec("P")
R = TypeVar("R")
TOTAL = 80 << 30


@contextmanager
def pretended_cuda(*, warms_up: bool = False) -> Iterator[World]:
    """Context with one CUDA device for each thread that enters `World.rank`.

    Nothing is compiled. Warm-up steps run only if `warms_up` is set, on CPU.
    """
    world = World()
    with _launches_of_ops(world), pytest.MonkeyPatch.context() as patch, patched_tensors():
        for name, value in _runtime(world).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(
            triton_backend, "make_schedule", _as_launch(world, "make_schedule", _schedule)
        )
        patch.setattr(triton_backend, "attend", _as_launch(world, "attend", _attend_rows))
        to_latents = _as_launch(world, "attend_to_latents", _attend_to_latents)
        patch.setattr(triton_backend, "attend_to_latents", to_latents)
        if not warms_up:
            patch.setattr(runner, "warm_up", lambda *_, **__: None)
        try:
            yield world
        finally:
            world.is_over = True


def device_properties() -> SimpleNamespace:
    """Properties of an H100 without a name."""
    return SimpleNamespace(
        name="a stand-in",
        total_memory=TOTAL,
        major=9,
        minor=0,
        multi_processor_count=132,
        uuid="GPU-0",
    )


def _runtime(world: World) -> dict[str, Any]:
    properties = device_properties()

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
        "mem_get_info": lambda *_: (TOTAL, TOTAL),
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


@contextmanager
def _launches_of_ops(world: World) -> Iterator[None]:
    """Context in which ops on device tensors are launches of their references."""
    select = Op.select

    def select_launches(op: Op[..., Any]) -> None:
        select(op)
        op.on_cuda = _as_launch(world, op.name, op.reference)

    ops = [registry[name] for name in registry]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Op, "select", select_launches)
            for op in ops:
                op.select()
            yield
    finally:
        for op in ops:
            op.select()


def _as_launch(world: World, name: str, function: Callable[P, R]) -> Callable[P, R]:
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = world.stand_in.opaque(name, function, args, kwargs)
        return result

    return launch


def _schedule(
    rows: AttentionRows, *, blocks: AttentionBlocks, queries: int, **_: object
) -> Schedule:
    """Creates one item per row, from lengths on the device."""
    items = rows.seq_lens.unsqueeze(1).repeat(1, 8)
    return Schedule(
        rows=rows,
        blocks=blocks,
        queries=queries,
        items=items,
        arrived=torch.zeros_like(items),
        num_partials=0,
    )


def _attend_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> None:
    """Computes attention row by row; reads only the visible pages of each row."""
    rows = schedule.rows
    lengths = schedule.items[:, 0].tolist()
    starts = list(range(len(lengths) + 1))
    if rows.query_start is not None:
        starts = rows.query_start.tolist()
    for row, length in enumerate(lengths):
        start, stop = starts[row : row + 2]
        if start == stop:
            continue
        query = torch.arange(length - (stop - start), length)
        if rows.is_bidirectional:
            query = torch.full_like(query, length - 1)
        first = max(0, int(query[0]) + 1 - rows.window) if rows.window else 0
        if length <= first:
            out[start:stop] = 0
            continue
        position = torch.arange(first, length)
        hidden = position[None] >= (query[:, None] // rows.block_size + 1) * rows.block_size
        if rows.window:
            hidden |= position[None] <= query[:, None] - rows.window
        pages = rows.page_table[row if rows.page_rows is None else int(rows.page_rows[row])]
        keys, values = (
            _gather(cache, pages, first, length).to(q.dtype) for cache in (k_cache, v_cache)
        )
        found = _attend(q[start:stop], keys, values, hidden, scale, cap, sinks)
        out[start:stop] = found * value_scale


def _attend_to_latents(
    q: torch.Tensor,
    cache: torch.Tensor,
    value_dim: int,
    metadata: AttentionMetadata,
    scale: float,
    arrived: torch.Tensor,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Computes attention in which the values are the leading dimensions of the keys. Counters of
    decodes must be as the previous launch left them."""
    if metadata.query_start is None:
        assert not arrived.any(), "programs of another launch were counted"
        arrived.add_(1)
        arrived.zero_()
    rows = AttentionRows(
        page_table=metadata.page_table,
        seq_lens=metadata.seq_lens,
        query_start=metadata.query_start,
    )
    out = q.new_empty(*q.shape[:2], value_dim)
    blocks = AttentionBlocks(1, 1, 1, 1, 1)
    schedule = _schedule(rows, blocks=blocks, queries=1)
    _attend_rows(
        *(q, cache, cache[..., :value_dim], out, schedule), scale=scale, value_scale=value_scale
    )
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
