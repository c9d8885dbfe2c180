"""Binaries that Triton would compile for the launches of complete engines, on tensors without
storage.

Triton's own binder computes a launch's key, for compute capability 9.0: types, values of constants,
whether numbers are 1 or multiples of 16, and whether pointers are aligned. Launches with equal keys
share a binary. A launch with a new key blocks the step for compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from tests.support.cuda.counted import Idle, counting
from tests.support.cuda.runtime import TOTAL, device_properties
from tests.support.cuda.tensors import DeviceTensor, site
from tests.support.kernels.aot import Driver
from worker.plan.plan import BlockRow
from worker.rank.diffusion.ahead import RoundAhead
from worker.rank.diffusion.table import Phase
from worker.rank.verification import Acceptance

CAPABILITY = 90
_ALIGNED = 512
"""Alignment of torch's CUDA allocator in bytes."""


class Variant(NamedTuple):
    """A kernel's binary."""

    kernel: str
    key: str
    """Key; launches with equal keys share a binary."""
    rank: int
    """Rank of the process that compiles it."""


class Variants:
    """Launches so far."""

    def __init__(self) -> None:
        self.rank = 0
        """Rank of subsequent launches."""
        self.sites: dict[Variant, str] = {}
        """First source location of each variant."""

    def since(self, earlier: set[Variant]) -> list[str]:
        """Later variants: kernel, rank, first source location, and the difference from the nearest
        earlier key."""
        return [
            f"{variant.kernel} of rank {variant.rank} at {where}: {_difference(variant, earlier)}"
            for variant, where in self.sites.items()
            if variant not in earlier
        ]


class _Pointer:
    """A tensor with the properties that a key needs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        content = tensor.content if isinstance(tensor, DeviceTensor) else tensor
        offset = content.storage_offset() * content.itemsize if content.numel() else 0
        self._address = _ALIGNED + int(offset)

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def noting_variants() -> Iterator[Variants]:
    """Context with a CUDA device whose memory has no content, in which launches are recorded.

    One sample per row of drafts is accepted, and each round ahead finishes its blocks, so that
    requests end.
    """
    noted = Variants()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs["debug"] = False
        binder = self.device_caches[CAPABILITY][4]
        given = (_Pointer(one) if isinstance(one, torch.Tensor) else one for one in args)
        _, specialization, options = binder(*given, **kwargs)
        key = f"{list(zip(self.arg_names, specialization, strict=True))} {sorted(options.items())}"
        noted.sites.setdefault(Variant(self.fn.__name__, key, noted.rank), site())

    with counting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", Driver(CAPABILITY))
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(Acceptance, "to_host", lambda step: [(0, 1)] * len(step.counts))
        patch.setattr(RoundAhead, "_on_host", _finished_blocks)
        for name, value in _runtime().items():
            patch.setattr(torch.cuda, name, value)
        yield noted


def _finished_blocks(
    launched: Any,
) -> Iterator[tuple[BlockRow, list[int], list[int], list[int]]]:
    """Outcome of a round ahead in which each block, or the one after a finished block, is
    finished."""
    table = launched._ahead.table
    for row in launched._rows:
        block, size = table.get(row.slot), table.block_size
        if block.phase in (Phase.FINISHED, Phase.COMMITTED):
            block = block._replace(start=block.start + size, num_fixed=0)
        columns = [block.start, block.num_fixed, 1, Phase.FINISHED, *block.state, *[0] * size]
        yield row, columns, [1] * size, [1, 1, 1, 1, 0, size - block.num_fixed]


def _runtime() -> dict[str, Any]:
    """Parts of torch.cuda that an engine uses outside a runner's steps."""
    properties = device_properties()
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731  # one of many
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: properties,
        "set_device": nothing,
        "empty_cache": nothing,
        "reset_peak_memory_stats": nothing,
        "max_memory_allocated": lambda *_: 1 << 20,
        "memory_reserved": lambda *_: 1 << 20,
        "mem_get_info": lambda *_: (TOTAL, TOTAL),
        "graph_pool_handle": object,
        "CUDAGraph": Idle,
        "graph": lambda *_, **__: nullcontext(),
    }


def _difference(variant: Variant, earlier: set[Variant]) -> str:
    """Difference from the most similar earlier key of the same kernel and rank."""
    own = variant.key.split("), (")
    kernel = [one for one in earlier if (one.kernel, one.rank) == (variant.kernel, variant.rank)]
    others = [one.key.split("), (") for one in kernel]
    if not others:
        return "never launched before"
    differing = [[(a, b) for a, b in zip(own, other, strict=False) if a != b] for other in others]
    return "; ".join(f"{a} in place of {b}" for a, b in min(differing, key=len))
