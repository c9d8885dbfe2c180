from __future__ import annotations

import math

import pytest
import torch

from kernels import gumbel_noise
from kernels.gumbel_noise import constants
from kernels.gumbel_noise.reference import hash_bits

_WORD = 0xFFFFFFFF


def _finalize(bits: int, key: int) -> int:
    bits = ((bits ^ (bits >> 16)) * constants.MIX_A) & _WORD
    bits ^= key
    bits = ((bits ^ (bits >> 15)) * constants.MIX_B) & _WORD
    return bits ^ (bits >> 16)


def _hash(seed: int, position: int, column: int) -> int:
    low, high = seed & _WORD, (seed >> 32) & _WORD
    key_a = _finalize((position * constants.WEYL + low) & _WORD, high)
    key_b = _finalize((key_a + constants.MIX_B) & _WORD, 0)
    key_b = _finalize((key_b + high) & _WORD, low)
    return _finalize((column * constants.WEYL + key_a) & _WORD, key_b)


def test_hash_is_the_scalar_definition() -> None:
    seeds, positions = [0, 1, -7, 2**40 + 3, -(2**63)], [0, 5, 2**31 - 1, 12, 900]
    bits = hash_bits(torch.tensor(seeds), torch.tensor(positions), 3, 40)
    expected = [
        [_hash(seed, position, column) for column in range(3, 40)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert (bits.long() & _WORD).tolist() == expected


def test_noise_is_the_inverse_distribution_of_the_hash() -> None:
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([8]), 300)[0]
    bits = hash_bits(torch.tensor([3]), torch.tensor([8]), 0, 300)[0].long() & 0x7FFFFFFF
    expected = [-math.log(-math.log1p(-(b + 0.5) * 2.0**-31)) for b in bits.tolist()]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_noise_is_a_function_of_seed_position_and_column(threads: int) -> None:
    torch.set_num_threads(threads)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (37,)), torch.randint(0, 5000, (37,))
    whole = gumbel_noise(seeds, positions, 4099)
    for row in (0, 5, 36):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 4099)
        assert torch.equal(alone, whole[row : row + 1])
    assert torch.equal(
        gumbel_noise(seeds.flip(0), positions.flip(0), 2500), whole.flip(0)[:, :2500]
    )


def test_distribution() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20) * 3, 50_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    # Kolmogorov-Smirnov distance to the Gumbel distribution, whole and per row.
    for sample in (noise.flatten(), noise[7]):
        ordered = sample.double().sort().values
        cdf = (-(-ordered).exp()).exp()
        rank = torch.arange(1, len(ordered) + 1) / len(ordered)
        assert (cdf - rank).abs().max().item() < 1.7 / math.sqrt(len(ordered))


def test_neighbouring_keys_are_uncorrelated() -> None:
    count = 64
    by_seed = gumbel_noise(torch.arange(count), torch.full((count,), 9), 20_000)
    by_high = gumbel_noise(torch.arange(count) << 32, torch.full((count,), 9), 20_000)
    by_position = gumbel_noise(torch.full((count,), 9), torch.arange(count), 20_000)
    for noise in (by_seed, by_high, by_position):
        correlation = torch.corrcoef(noise).fill_diagonal_(0)
        assert correlation.abs().max().item() < 5.5 / math.sqrt(20_000)
    columns = torch.corrcoef(
        gumbel_noise(torch.arange(20_000), torch.zeros(20_000).long(), count).t()
    )
    assert columns.fill_diagonal_(0).abs().max().item() < 5.5 / math.sqrt(20_000)


def test_sampling_follows_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    draws = 40_000
    noise = gumbel_noise(torch.full((draws,), 123), torch.arange(draws), 5)
    counts = torch.bincount((logits + noise).argmax(dim=1), minlength=5) / draws
    torch.testing.assert_close(counts, logits.softmax(0), rtol=0, atol=0.01)


def test_no_rows() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert gumbel_noise(empty, empty, 10).shape == (0, 10)
