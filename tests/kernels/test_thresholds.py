"""Thresholds against sorting, ties and signs included, and rows against each other."""

from __future__ import annotations

import pytest
import torch

from kernels.sample_tokens import thresholds
from kernels.sample_tokens.thresholds import (
    integer_weights,
    top_k_threshold,
    top_p_threshold,
    weighted_threshold,
)

VOCAB = 1001


def make_logits(rows: int = 6, scale: float = 3.0, seed: int = 1) -> torch.Tensor:
    """Rounded, so that there are ties; zeros of both signs and dropped tokens among them."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    logits = (logits * 8).round() / 8
    logits[:, 5:9] = torch.tensor([0.0, -0.0, float("-inf"), 1e-40])
    return logits


def by_sorting(logits: torch.Tensor, weights: torch.Tensor, target: int) -> float:
    total = 0
    for token in sorted(range(len(logits)), key=lambda token: -float(logits[token])):
        total += int(weights[token])
        if total >= target:
            return float(logits[token])
    raise AssertionError("the target is more than all")


@pytest.mark.parametrize("top_k", [1, 2, 17, 64, 65, 700, VOCAB, VOCAB + 5])
def test_top_k_equals_sorting(top_k: int) -> None:
    logits = make_logits()
    found = top_k_threshold(logits, torch.full((6,), top_k), top_k)
    for row, threshold in zip(logits, found.tolist(), strict=True):
        assert threshold == sorted(row.tolist(), reverse=True)[min(top_k, VOCAB) - 1]


@pytest.mark.parametrize("top_p", [1e-30, 0.1, 0.5, 0.9, 0.999, 1.0 - 2**-24])
@pytest.mark.parametrize("scale", [0.01, 0.5, 3.0, 30.0])
def test_top_p_equals_sorting(top_p: float, scale: float) -> None:
    logits = make_logits(scale=scale)
    found = top_p_threshold(logits, torch.full((6,), top_p))
    weights = integer_weights(logits)
    for row, own, threshold in zip(logits, weights, found.tolist(), strict=True):
        share = torch.tensor(top_p, dtype=torch.float32).double() * own.sum().double()
        assert threshold == by_sorting(row, own, max(1, int(share.ceil())))


def test_few_likeliest_and_all_lead_to_the_same() -> None:
    logits = make_logits()
    weights = integer_weights(logits)
    targets = torch.tensor([1, 2**39, 2**40, 2**40 + 1, 2**41, 2**41 + 9])
    narrow, is_reached = thresholds._narrow_threshold(logits, weights, targets)
    wide = weighted_threshold(logits, weights, targets)
    assert is_reached.sum() > 3
    assert torch.equal(narrow[is_reached], wide[is_reached])


def test_rows_do_not_depend_on_their_place() -> None:
    logits = make_logits(rows=17, scale=0.7)
    top_p = torch.linspace(0.05, 0.99, 17)
    together = top_p_threshold(logits, top_p)
    assert torch.equal(thresholds.total_weight(logits), integer_weights(logits).sum(-1))
    weights = integer_weights(logits)
    for row in range(17):
        alone = logits[row : row + 1].clone()
        assert torch.equal(integer_weights(alone)[0], weights[row])
        assert top_p_threshold(alone, top_p[row : row + 1]) == together[row]


def test_a_large_vocabulary_is_worked_off_row_by_row() -> None:
    logits = torch.randn(3, 150_000, generator=torch.Generator().manual_seed(2))
    top_p = torch.tensor([0.9, 0.3, 1.0])
    weights = integer_weights(logits)
    targets = (top_p.double() * weights.sum(-1).double()).ceil().long()
    expected = weighted_threshold(logits, weights, targets)
    found = top_p_threshold(logits, top_p)
    assert torch.equal(found[:2], expected[:2])
    assert found[2] == float("-inf")
