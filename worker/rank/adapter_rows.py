"""LoRA adapters of a step's tokens, as arrays for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.lora import (
    LoraTiles,
    count_tiles,
    host_groups,
    tile_arrays,
    tiles_of_one,
    token_groups,
)
from kernels.native import StepAdapters
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray, Tensors


class AdapterRows:
    """Adapters of a step's tokens.

    Args:
        adapters: [T] slot of each token's adapter; 0 if it has none.
        num_tiles: number of tiles in the graph; 0 for an eager step.
    """

    def __init__(self, adapters: npt.NDArray[np.int32], num_tiles: int) -> None:
        self._adapters, self._num_tiles = adapters, num_tiles

    def all(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays `adapter_slots` and `adapter_tokens` (see `LoraTiles`) for all tokens."""
        return _arrays(self._adapters, self._num_tiles)

    def selected(self, tokens: IntArray) -> dict[str, npt.NDArray[Any]]:
        """The arrays of `all`, restricted to the given token indices. In them, tokens are numbered
        by their positions in `tokens`."""
        return _arrays(self._adapters[tokens], 0)

    def on_host(self, logits_indices: torch.Tensor | None) -> StepAdapters:
        """The adapters for the compiled CPU library; `logits_indices` are the tokens whose hidden
        states are needed, None for all."""
        tokens = slice(None) if logits_indices is None else logits_indices.numpy()
        return StepAdapters(host_groups(self._adapters), host_groups(self._adapters[tokens]))


def adapter_rows(
    adapters: npt.NDArray[np.int32],
    lengths: IntArray,
    max_loras: int,
    *,
    is_eager: bool,
    is_capture: bool,
) -> AdapterRows | None:
    """Adapters of the tokens of a step's rows; None if no token has one.

    Args:
        adapters: [R] slot of each row's adapter; 0 if it has none.
        lengths: [R] number of tokens of each row.
        max_loras: number of adapter slots.
        is_eager: whether the step runs without a CUDA graph.
        is_capture: whether the step captures a graph for tokens with adapters, so that the result
            is never None.
    """
    adapters = np.repeat(adapters, lengths)
    if not is_capture and not adapters.any():
        return None
    return AdapterRows(adapters, 0 if is_eager else count_tiles(len(adapters), max_loras))


def adapter_tiles(staged: Tensors) -> LoraTiles:
    """LoRA tiles of a step's tokens, from their staged arrays."""
    slots, tokens = staged["adapter_slots"], staged["adapter_tokens"]
    groups = token_groups(slots, tokens) if slots.is_cpu else None
    return LoraTiles(slots=slots, tokens=tokens, groups=groups)


def logits_tiles(selected: Tensors, tables: DeviceTables) -> LoraTiles | None:
    """Adapters that the LM head applies to the tokens in `Batch.selected_adapters`; None if the LM
    head cannot have adapters."""
    return adapter_tiles(selected) if tables.adapts_logits else None


def row_tiles(slot: int, num_tokens: int, tables: DeviceTables) -> LoraTiles | None:
    """Adapter that the LM head applies to the tokens of one row, in slot `slot`; None if the row or
    the LM head has no adapter."""
    if tables.adapters is None or not tables.adapts_logits:
        return None
    adapter = int(tables.adapters[slot])
    return tiles_of_one(adapter, num_tokens, tables.device) if adapter else None


def _arrays(adapters: npt.NDArray[np.int32], num_tiles: int) -> dict[str, npt.NDArray[Any]]:
    arrays = tile_arrays(adapters, num_tiles)
    return {f"adapter_{name}": array for name, array in arrays.items()}
