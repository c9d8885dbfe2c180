"""Products with low-rank weights on CPU, and tiles of tokens by adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.lora import LoraWeights, add_lora_, count_tiles, tile_arrays
from kernels.lora.base import TILE_TOKENS
from tests.support.kernels.lora_cases import PARTS, make_lora, make_tiles

ADAPTERS = [2] * 19 + [0, 3, 0, 1, 2, 1]


def expected_sum(before: torch.Tensor, x: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
    """Token by token, in fp64."""
    total = before.double()
    for token, slot in enumerate(ADAPTERS):
        for start, stop, group in PARTS if slot else ():
            a = weights.a[slot - 1].unflatten(0, (weights.num_groups, -1))[group].double()
            b = weights.b[slot - 1, :, start:stop].double()
            total[token, start:stop] += x[token].double() @ a.t() @ b
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
def test_products_are_added_to_tokens_with_adapters(
    dtype: torch.dtype, *, is_native: bool, batch_invariant: bool
) -> None:
    torch.manual_seed(1)
    weights = make_lora(
        *("cpu", dtype), in_features=147, batch_invariant=batch_invariant, is_native=is_native
    )
    x = torch.randn(len(ADAPTERS), 147).to(dtype)
    before = torch.randn(len(ADAPTERS), PARTS[-1].stop).to(dtype)
    actual = add_lora_(before.clone(), x, weights, make_tiles(ADAPTERS, "cpu"))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    expected = expected_sum(before, x, weights)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    without = torch.tensor(ADAPTERS) == 0
    assert torch.equal(actual[without], before[without])
    if batch_invariant or is_native:
        for token in (0, 18, 20, 24):
            row = slice(token, token + 1)
            alone = make_tiles([ADAPTERS[token]], "cpu")
            assert torch.equal(add_lora_(before[row].clone(), x[row], weights, alone), actual[row])


def test_slots_are_replaced_and_cleared() -> None:
    weights = make_lora("cpu", torch.float32, in_features=32, rank=9)
    weights.load(1, torch.ones(2, 1, 32), torch.ones(1, PARTS[-1].stop))
    out = add_lora_(
        torch.zeros(1, PARTS[-1].stop), torch.ones(1, 32), weights, make_tiles([1], "cpu")
    )
    assert torch.equal(out, torch.full_like(out, 32.0))
    weights.clear(1)
    assert not weights.a[0].any()
    assert not weights.b[0].any()


def test_every_token_with_an_adapter_is_in_one_tile_of_it() -> None:
    rng = np.random.default_rng(4)
    for num_slots, num_tokens in rng.integers(1, 90, (60, 2)).tolist():
        share = rng.random()
        adapters = np.where(
            rng.random(num_tokens) < share, rng.integers(0, num_slots + 1, num_tokens), 0
        ).astype(np.int32)
        num_tiles = count_tiles(num_tokens, num_slots)
        for count in (0, num_tiles):
            arrays = tile_arrays(adapters, count)
            tokens = arrays["tokens"].reshape(-1, TILE_TOKENS)
            is_token = tokens >= 0
            assert sorted(tokens[is_token]) == np.nonzero(adapters)[0].tolist()
            assert (adapters[tokens] == arrays["slots"][:, None])[is_token].all()
            assert (np.diff(is_token.astype(int), axis=1) <= 0).all(), "a tile's tokens come first"
            assert (is_token[:, 0] == (arrays["slots"] > 0)).all(), "no used tile is empty"
            assert len(arrays["slots"]) == count or not count


def test_threads_share_many_tokens_bitwise() -> None:
    torch.manual_seed(2)
    x, before = torch.randn(700, 40), torch.randn(700, PARTS[-1].stop)
    tiles = make_tiles([1] * 600 + [0, 2] * 50, "cpu")
    found, num_threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(3)
            weights = make_lora("cpu", torch.float32, in_features=40, is_native=True)
            assert weights.native is not None
            assert weights.native._step.num_threads == count
            found.append(add_lora_(before.clone(), x, weights, tiles))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(*found)
