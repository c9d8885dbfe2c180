from __future__ import annotations

import math

import torch

from kernels import apply_token_bitmask


def test_only_tokens_with_their_bit_set_remain() -> None:
    logits = torch.arange(210.0).view(3, 70)
    before = logits.clone()
    words = torch.zeros(2, 3, dtype=torch.int32)
    words[0, 0] = 1 | 1 << 5
    words[0, 2] = 1 << 5  # token 69, the last
    words[1] = -1
    words[1, 1] = 0x7FFFFFFF  # all but token 63
    apply_token_bitmask(logits, words, torch.tensor([2, 0]))
    assert torch.equal(logits[1], before[1])
    allowed = torch.zeros(70, dtype=torch.bool)
    allowed[[0, 5, 69]] = True
    assert torch.equal(logits[2], before[2].masked_fill(~allowed, -math.inf))
    expected = before[0].clone()
    expected[63] = -math.inf
    assert torch.equal(logits[0], expected)


def test_all_rows_in_order_and_a_mask_of_ones() -> None:
    logits = torch.randn(2, 33)
    before = logits.clone()
    apply_token_bitmask(logits, torch.full((2, 2), -1, dtype=torch.int32))
    assert torch.equal(logits, before)
    apply_token_bitmask(logits, torch.tensor([[0, 1], [2, 0]], dtype=torch.int32))
    assert logits.isfinite().nonzero().tolist() == [[0, 32], [1, 1]]
