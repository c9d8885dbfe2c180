"""Sampling in the compiled CPU library against torch: the same tokens except for near ties."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import apply_token_bitmask, gumbel_noise
from kernels.native import apply_bitmask_native, sample_native
from kernels.sample_tokens.base import SamplingParameters
from kernels.sample_tokens.reference import masked_logits

ROWS = 64
NEAR_TIE = 1e-4
FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 0.9},
    {"top_p": 0.2},
    {"top_p": 0.99999},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.01},
)


def parameters(rows: int, filters: dict[str, float], temperature: float) -> SamplingParameters:
    generator = torch.Generator().manual_seed(3)
    column = {name: torch.full((rows,), value) for name, value in filters.items()}
    return SamplingParameters(
        temperature=torch.full((rows,), temperature),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        positions=torch.randint(0, 100_000, (rows,), generator=generator),
        top_k=column["top_k"].long() if "top_k" in column else None,
        top_p=column.get("top_p"),
        log_min_p=column["min_p"].log() if "min_p" in column else None,
    )


def reference(logits: torch.Tensor, how: SamplingParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy logits, whose argmax is the sample, and logits kept by filters."""
    kept = masked_logits(logits, how)
    return gumbel_noise(how.seeds, how.positions, logits.shape[-1]) + kept, kept


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [37, 2560])
def test_draws_equal_torch(vocab_size: int, filters: dict[str, float]) -> None:
    torch.manual_seed(1)
    for scale, temperature in ((1.0, 1.0), (4.0, 0.7), (0.05, 1.3)):
        logits = torch.randn(ROWS, vocab_size) * scale
        logits[:, ::5] = -math.inf  # as masks leave them
        how = parameters(ROWS, filters, temperature)
        noisy, kept = reference(logits, how)
        tokens = sample_native(logits, how)
        expected = noisy.argmax(dim=-1)
        gap = noisy.gather(1, expected[:, None]) - noisy.gather(1, tokens[:, None])
        # At the edge of a nucleus one token more or less may be kept.
        edge = torch.where(kept.isinf(), math.inf, kept).amin(dim=-1, keepdim=True)
        at_edge = kept.gather(1, expected[:, None]) <= edge + 1e-3
        assert bool(((gap < NEAR_TIE) | at_edge).all())
        assert int((tokens != expected).sum()) <= 1


def test_greedy_rows_among_random_ones() -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 513)
    logits[3, 100] = logits[3, 200] = 9.0
    assert torch.equal(sample_native(logits, None), logits.argmax(dim=-1))
    assert sample_native(logits, None)[3] == 100, "the first of equals"
    how = parameters(9, {"top_p": 0.8}, 1.0)
    alone = sample_native(logits, how)
    others = [row for row in range(9) if row not in (1, 5)]
    how.temperature[others] = 0.0
    mixed = sample_native(logits, how)
    assert torch.equal(mixed[[1, 5]], alone[[1, 5]])
    assert torch.equal(mixed[others], logits[others].argmax(dim=-1))
    assert sample_native(logits[:, ::2], None).tolist() == logits[:, ::2].argmax(-1).tolist()


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -math.inf]])
    count = 20_000
    how = SamplingParameters(
        temperature=torch.ones(count),
        seeds=torch.full((count,), 11),
        positions=torch.arange(count),
    )
    tokens = sample_native(logits.expand(count, -1), how)
    shares = torch.bincount(tokens, minlength=5) / count
    torch.testing.assert_close(shares, logits[0].softmax(dim=-1), atol=0.012, rtol=0)


def test_rows_without_a_finite_logit_yield_some_token() -> None:
    logits = torch.full((2, 33), -math.inf)
    tokens = sample_native(logits, parameters(2, {"top_p": 0.5, "top_k": 3}, 1.0))
    assert ((tokens >= 0) & (tokens < 33)).all()


@pytest.mark.parametrize("vocab_size", [32, 37, 2560, 2571])
def test_bitmasks_equal_the_reference(vocab_size: int) -> None:
    torch.manual_seed(4)
    words = -(-vocab_size // 32)
    bitmask = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int32)
    bitmask[1, : words // 2] = -1
    expected, rows = torch.randn(5, vocab_size), [4, 0, 2]
    actual = expected.clone()
    apply_token_bitmask(expected, bitmask, torch.tensor(rows))
    apply_bitmask_native(actual, rows, bitmask.numpy().astype("<i4").tobytes())
    assert torch.equal(actual, expected)
