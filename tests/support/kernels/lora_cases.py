"""LoRA on Triton against torch, for the interpreter and GPUs."""

from __future__ import annotations

import numpy as np
import torch

from kernels import registry
from kernels.lora import LoraPart, LoraTiles, LoraWeights, add_lora_, count_tiles, tile_arrays

PARTS = (LoraPart(0, 70, 0), LoraPart(70, 80, 1), LoraPart(80, 83, 0))
"""Output features of two projections, one of which is in two parts."""


def make_lora(
    device: str,
    dtype: torch.dtype,
    *,
    in_features: int = 1100,
    rank: int = 20,
    num_slots: int = 3,
    batch_invariant: bool = True,
    is_native: bool = False,
) -> LoraWeights:
    """Random adapters of different ranks."""
    weights = LoraWeights.allocate(
        num_slots=num_slots,
        in_features=in_features,
        parts=PARTS,
        rank=rank,
        dtype=dtype,
        device=torch.device(device),
        batch_invariant=batch_invariant,
        is_native=is_native,
    )
    for slot in range(num_slots):
        own = max(1, rank - 7 * slot)
        a = torch.randn(weights.num_groups, own, in_features) / in_features**0.5
        weights.load(slot + 1, a, torch.randn(own, PARTS[-1].stop) / own**0.5)
    return weights


def make_tiles(adapters: list[int], device: str, num_tiles: int = 0) -> LoraTiles:
    """Tiles of the tokens with these adapters."""
    arrays = tile_arrays(np.array(adapters, np.int32), num_tiles)
    slots, tokens = (torch.from_numpy(arrays[name]).to(device) for name in ("slots", "tokens"))
    return LoraTiles(slots=slots, tokens=tokens)


def lora_case(device: str, dtype: torch.dtype) -> None:
    """Checks tokens of three adapters and of none, also with a graph's number of tiles, and that a
    token's result is bitwise independent of the other tokens."""
    adapters = [2] * 19 + [0, 3, 0, 1, 2, 1]
    weights = make_lora(device, dtype)
    x = torch.randn(len(adapters), 1100).to(device, dtype)
    before = torch.randn(len(adapters), PARTS[-1].stop).to(device, dtype)
    tiles = make_tiles(adapters, device)
    with registry.using("torch"):
        expected = add_lora_(before.clone(), x, weights, tiles)
    with registry.using("triton"):
        actual = add_lora_(before.clone(), x, weights, tiles)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        without = torch.tensor(adapters) == 0
        assert torch.equal(actual[without], before[without])
        padded = make_tiles(adapters, device, count_tiles(len(adapters), 3))
        assert torch.equal(add_lora_(before.clone(), x, weights, padded), actual)
        for token in (0, 18, 20, 24):
            alone = make_tiles([adapters[token]], device)
            row = slice(token, token + 1)
            assert torch.equal(add_lora_(before[row].clone(), x[row], weights, alone), actual[row])


LORA_CASES = [lora_case]
