"""Case of benchmark `kernels`, model shapes, and the case of elementwise ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from kernels import registry
from kernels.linear.scaled import FP8_CAPABILITY


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op on one shape."""

    op: str
    shape: str
    """Description of the shape."""
    run: Callable[[], object]
    """Runs the op once."""
    num_bytes: float
    """Bytes moved if each input is read once and each output is written once."""
    num_flops: float = 0.0
    """Floating-point operations of matmuls; 0 if the op has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Dimensions of a model."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def large(cls) -> Self:
        """Dimensions of Qwen3-8B."""
        return cls(
            hidden=4096, intermediate=12288, q_heads=32, kv_heads=8, head_dim=128, vocab=151936
        )

    @classmethod
    def small(cls) -> Self:
        """Dimensions of Qwen3-0.6B, with 1/5 of its vocabulary."""
        return cls(
            hidden=1024, intermediate=3072, q_heads=16, kv_heads=8, head_dim=128, vocab=32000
        )


def unsupported_ops(capability: tuple[int, int] | None) -> dict[str, str]:
    """Ops that a GPU with this compute capability does not support, and why.

    Args:
        capability: compute capability of the GPU; None for CPU, which supports all ops.
    """
    if capability is None or capability >= FP8_CAPABILITY:
        return {}
    needed, actual = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
    reason = f"needs compute capability {needed}, this GPU has {actual}"
    return dict.fromkeys(("quantize_fp8", "fused_add_norm_fp8", "activate_fp8"), reason)


def elementwise_case(
    name: str, size: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> Case:
    """Case of an op whose output has the shape of its input tensors; its other inputs are numbers.

    Args:
        name: name of the op.
        size: number of tokens, and features per token.
        device: device of all tensors.
        dtype: data type of all tensors.
    """
    op, is_cuda = registry[name], device.type == "cuda"
    arguments: list[torch.Tensor | float] = [
        torch.randn(size, device=device, dtype=dtype) if p.annotation == "torch.Tensor" else 1.0
        for p in inspect.signature(op.reference).parameters.values()
    ]
    num_tensors = 1 + sum(isinstance(argument, torch.Tensor) for argument in arguments)
    return Case(
        op=name,
        shape=f"{size[0]} tokens",
        run=lambda: (op.on_cuda if is_cuda else op.on_cpu)(*arguments),
        num_bytes=float(num_tensors * size[0] * size[1] * dtype.itemsize),
    )
