"""Activations of MLPs without a gate, fused into one launch on CUDA."""

from __future__ import annotations

import torch

from kernels.activation import reference
from kernels.registry import registry

_SQUARED_RELU = registry.register(
    "squared_relu",
    reference.squared_relu,
    triton="kernels.activation.triton_kernel:squared_relu",
)
_XIELU = registry.register(
    "xielu", reference.xielu, triton="kernels.activation.triton_kernel:xielu"
)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Squared ReLU of x [T, I], in the type of x."""
    return _SQUARED_RELU.select(x)(x)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """xIELU (arXiv 2411.13010): p x² + b x for positive elements, and
    n (exp(min(x, e)) - 1 - x) + b x for others; computed in fp32, rounded to the type of x.

    Args:
        x: [T, I].
        numbers: fp32 [4]: the parameters p, n, b and e.
    """
    return _XIELU.select(x)(x, numbers)


__all__ = ["squared_relu", "xielu"]
