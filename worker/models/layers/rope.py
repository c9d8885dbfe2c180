"""Rotary embedding (RoPE): tables of cosines and sines by position."""

from __future__ import annotations

import math

import torch

from worker.models.config.rope_config import RopeConfig


def cos_sin_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """Rotary table, fp32 [num_positions, head_dim]: cosines in the first half of each row, sines in
    the second."""
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)


def query_scales(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor | None:
    """Query scale by position, fp32 [num_positions]; None if queries are not scaled."""
    if not rope.query_beta:
        return None
    positions = torch.arange(num_positions, dtype=torch.float32)
    turns = torch.floor(positions / rope.original_max_position_embeddings)
    return (1 + rope.query_beta * torch.log(1 + turns)).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Inverse frequencies after scaling, fp32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    plain = 1.0 / wavelengths
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "proportional":
        assert rope.rotating_share is not None, "checked when config.json is read"
        num_rotating = int(rope.rotating_share * head_dim // 2)
        return torch.where(torch.arange(head_dim // 2) < num_rotating, plain / rope.factor, 0.0)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "longrope":
        assert rope.short_factors is not None, "checked when config.json is read"
        return plain / torch.tensor(rope.short_factors)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, head_dim)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones are kept, and others are
    interpolated."""
    original = rope.original_max_position_embeddings
    waves = 2 * math.pi / plain
    stretched = torch.where(waves > original / rope.low_freq_factor, plain / rope.factor, plain)
    share = (original / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * stretched / rope.factor + share * stretched
    is_short = waves < original / rope.high_freq_factor
    is_long = waves > original / rope.low_freq_factor
    return torch.where(is_short | is_long, stretched, blended)


def _yarn(rope: RopeConfig, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): frequencies are kept, divided by the factor or, on a linear ramp
    over dimensions, in between."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
