"""Triton matmuls of few rows, split over input features (split-K).

With one program per tile of output features, there are too few programs to fill a device. So
several programs compute a tile, each for a share of the input features: they store partial sums,
and the one that arrives last adds them in order. Equal inputs give bitwise equal results, including
in CUDA graphs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear.triton_kernel import num_processors
from kernels.tiles import cdiv

_PROGRAMS_PER_PROCESSOR = 2
"""Input features are split until there are this many programs per multiprocessor."""
_MOST_SPLITS = 8
_LEAST_STEPS = 2
"""Minimum number of tiles per split."""


def split_steps(num_tiles: int, num_steps: int, device: torch.device) -> int:
    """Number of tiles along input features per split, chosen so that programs fill the device.

    Args:
        num_tiles: tiles of the output.
        num_steps: tiles along the input features.
        device: device of the output.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors(device) // num_tiles
    return cdiv(num_steps, max(1, min(wanted, num_steps // _LEAST_STEPS, _MOST_SPLITS)))


def count_arrivals(device: torch.device) -> torch.Tensor:
    """Counters that identify the last program of a tile whose input features are split.

    They are zero between launches, since the last program resets its tile's counter. Matmuls that
    may run concurrently need separate counters.
    """
    # Tiles are only split if there are fewer than half as many.
    size = _PROGRAMS_PER_PROCESSOR * num_processors(device)
    return torch.zeros(size, dtype=torch.int32, device=device)


def new_parts(num_tiles: int, num_splits: int, size: int, arrived: torch.Tensor) -> torch.Tensor:
    """Memory for partial sums.

    Args:
        num_tiles: tiles of the output.
        num_splits: splits of each tile.
        size: elements of a tile.
        arrived: counters of the weight.
    """
    if num_splits == 1:
        return arrived.view(torch.float32)  # unused
    shape = num_tiles * num_splits * size
    return torch.empty(shape, dtype=torch.float32, device=arrived.device)


@triton.jit
def store_sum(
    total, tile, row, column, rows, columns, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores a tile [BLOCK_N, BLOCK_M] of a matmul's output, plus bias. If axis 1 of the grid
    splits the input features, `total` is a partial sum, and the last program of the tile stores the
    total.

    Args:
        row: [BLOCK_M]: rows of the tile, among `rows` in total.
        column: [BLOCK_N]: output features, among `columns` in total.
    """
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    is_last = num_splits == 1
    if num_splits > 1:
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        part = partial_ptr + tile * num_splits * (BLOCK_M * BLOCK_N) + cell
        tl.store(part + split * (BLOCK_M * BLOCK_N), total)
        # HAZARD(order): all threads' stores must precede the count, and the count must precede all
        # loads.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == num_splits - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in range(num_splits):
                total += tl.load(part + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
            total += bias.to(tl.float32)[:, None]
        tl.store(
            out_ptr + row[None, :] * columns + column[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=(row < rows)[None, :] & (column < columns)[:, None],
        )
