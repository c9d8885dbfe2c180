"""Torch GELU-and-multiply.

(1 + tanh(z)) / 2 is the sigmoid of 2 * z, whose `exp` evaluates every element alike, where torch's
own gelu may end a run with another function than its body.
"""

from __future__ import annotations

import math

import torch

CUBIC = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gate / (1 + exp(-SLOPE * (gate + CUBIC * gate ** 3))) * up."""
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float32 else x.float()
    gate, up = wide[:, :half], wide[:, half:]
    cubic = (gate * gate).mul_(CUBIC).add_(1.0).mul_(gate)
    return gate.div(cubic.mul_(-SLOPE).exp_().add_(1.0)).mul_(up).to(x.dtype)
