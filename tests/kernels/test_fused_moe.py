"""Mixtures of experts against every expert written out, and the same bits in any company."""

from __future__ import annotations

import torch

from kernels.fused_moe import fused_moe


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    x = torch.randn(37, 48).to(dtype)
    gate_up = (torch.randn(6, 2 * 40, 48) * 48**-0.5).to(dtype)
    down = (torch.randn(6, 48, 40) * 40**-0.5).to(dtype)
    expert_ids = torch.stack([torch.randperm(6)[:2] for _ in range(37)])
    return x, gate_up, down, expert_ids, torch.rand(37, 2)


def test_equals_all_experts_written_out() -> None:
    x, gate_up, down, expert_ids, weights = make()
    gate, up = torch.einsum("th,enh->etn", x, gate_up).chunk(2, dim=-1)
    every = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, down)
    tokens = torch.arange(37).unsqueeze(1)
    expected = (every[expert_ids, tokens] * weights.unsqueeze(2)).sum(1)
    out = fused_moe(x, gate_up, down, expert_ids, weights)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert fused_moe(x[:0], gate_up, down, expert_ids[:0], weights[:0]).shape == (0, 48)


def test_bits_do_not_depend_on_company() -> None:
    x, gate_up, down, expert_ids, weights = make()
    whole = fused_moe(x, gate_up, down, expert_ids, weights)
    for rows in (slice(0, 1), slice(3, 20), slice(36, 37)):
        part = fused_moe(x[rows], gate_up, down, expert_ids[rows], weights[rows])
        assert torch.equal(part, whole[rows])
