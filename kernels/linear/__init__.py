"""Linear layers: a weight packed once for the way it will be used, and the product with it."""

from __future__ import annotations

import torch

from kernels.linear import onednn
from kernels.linear.base import BlockScales, PackedLinear, WeightCode
from kernels.linear.plain import PlainWeight
from kernels.linear.quantized import TritonQuantizedWeight, dequantize
from kernels.linear.tiled import TiledWeight, TritonTiledWeight
from kernels.registry import registry


def linear(
    x: torch.Tensor, weight: PackedLinear | torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N].

    `weight` is what `pack_linear_weight` returned, or a plain tensor (never batch-invariant).
    """
    if isinstance(weight, PackedLinear):
        return weight.multiply(x, bias)
    return torch.nn.functional.linear(x, weight, bias)


def pack_linear_weight(weight: torch.Tensor, *, batch_invariant: bool = False) -> PackedLinear:
    """Choose the packed form for a weight [N, K].

    On CPU the packed form (fp32; bf16 where the processor has it) owns a copy in another layout:
    drop the original afterwards (keep it only where it is needed unpacked too, as a tied embedding
    is for its lookup). Elsewhere it holds the given tensor itself.

    With `batch_invariant` a row's result does not depend, in any bit, on the other rows, on their
    number or on the row's place.
    """
    if registry.uses_triton(weight.device):
        return TritonTiledWeight(weight) if batch_invariant else PlainWeight(weight)
    if weight.device.type == "cpu" and onednn.is_available(weight.dtype):
        if not batch_invariant:
            return onednn.OnednnWeight(weight)
        if weight.dtype == torch.float32:
            invariant = onednn.InvariantOnednnWeight(weight)
            if invariant.rows_agree():
                return invariant
    return TiledWeight(weight) if batch_invariant else PlainWeight(weight)


def pack_quantized_linear_weight(
    codes: torch.Tensor,
    scaling: BlockScales,
    *,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> PackedLinear:
    """Choose the packed form for a quantized weight.

    On CPU it is dequantized here, once.

    Args:
        codes: uint8, as `dequantize` takes them.
        scaling: of these.
        dtype: of the inputs.
        batch_invariant: see `pack_linear_weight`.
    """
    if registry.uses_triton(codes.device):
        return TritonQuantizedWeight(codes, scaling)
    weight = dequantize(codes, scaling, dtype=dtype)
    return pack_linear_weight(weight, batch_invariant=batch_invariant)


__all__ = [
    "BlockScales",
    "PackedLinear",
    "WeightCode",
    "dequantize",
    "linear",
    "pack_linear_weight",
    "pack_quantized_linear_weight",
]
