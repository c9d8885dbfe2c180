"""LoRA: adds the output of each token's low-rank adapter to a layer's output."""

from __future__ import annotations

from kernels.lora.base import (
    LoraPart,
    LoraTiles,
    LoraWeights,
    count_tiles,
    host_groups,
    padded_rank,
    tile_arrays,
    tiles_of_one,
    token_groups,
    token_slots,
)
from kernels.lora.reference import add_lora_

__all__ = [
    "LoraPart",
    "LoraTiles",
    "LoraWeights",
    "add_lora_",
    "count_tiles",
    "host_groups",
    "padded_rank",
    "tile_arrays",
    "tiles_of_one",
    "token_groups",
    "token_slots",
]
