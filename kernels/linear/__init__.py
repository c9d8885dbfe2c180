"""Linear layers, whose weights are packed once and multiplied many times."""

from __future__ import annotations

import torch

from kernels.linear import onednn
from kernels.linear.base import BlockScales, PackedLinear, WeightCode
from kernels.linear.packed_codes import PackedCodes, pack_codes
from kernels.linear.plain import PlainWeight
from kernels.linear.quantized import TritonQuantizedWeight, dequantize, quantize_weight
from kernels.linear.scaled import Fp8Weight, product_scales
from kernels.linear.skinny import SkinnyWeight, is_skinny
from kernels.linear.tiled import TiledWeight, TritonTiledWeight
from kernels.quantize_fp8 import Fp8Rows
from kernels.registry import registry


def linear(
    x: torch.Tensor | Fp8Rows,
    weight: PackedLinear | torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies x [T, K] by the transposed weight [N, K], and adds bias [N]: [T, N].

    Args:
        x: [T, K], or rows quantized to FP8 in the format `weight.fp8_inputs`.
        weight: a packed weight, or a plain tensor, with which results are not batch-invariant.
        bias: [N]; None if unused.
    """
    if isinstance(x, Fp8Rows):
        assert isinstance(weight, Fp8Weight), "the weight has no FP8 inputs"
        return weight.multiply_fp8(x, bias)
    if isinstance(weight, PackedLinear):
        return weight.multiply(x, bias)
    return torch.nn.functional.linear(x, weight, bias)


def pack_linear_weight(weight: torch.Tensor, *, batch_invariant: bool = False) -> PackedLinear:
    """Packs a weight [N, K] for its device and type.

    On CPU, the packed form owns a copy in another layout (fp32, and bf16 if the CPU supports it):
    drop the original afterwards, unless it is also needed unpacked, like a tied embedding.
    Otherwise, the packed form keeps the given tensor.

    With `batch_invariant`, a row's result is bitwise independent of other rows, their number and
    the row's position.
    """
    if registry.uses_triton(weight.device):
        return TritonTiledWeight(weight) if batch_invariant else _plain_or_skinny(weight)
    if weight.device.type == "cpu" and onednn.is_available(weight.dtype):
        if not batch_invariant:
            return onednn.OnednnWeight(weight)
        if weight.dtype == torch.float32:
            invariant = onednn.InvariantOnednnWeight(weight)
            if invariant.rows_agree():
                return invariant
    return TiledWeight(weight) if batch_invariant else PlainWeight(weight)


def _plain_or_skinny(weight: torch.Tensor) -> PackedLinear:
    """A weight whose matmuls run in torch or, for few rows on CUDA, in Triton."""
    if not weight.is_cuda:
        return PlainWeight(weight)
    count = torch.cuda.get_device_properties(weight.device).multi_processor_count
    return SkinnyWeight(weight) if is_skinny(weight, count) else PlainWeight(weight)


def pack_quantized_linear_weight(
    codes: torch.Tensor,
    scaling: BlockScales,
    *,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> PackedLinear:
    """Packs a quantized weight for its device. On CPU, or if fewer than 16 adjacent features share
    a scale, it is dequantized. Matmuls of more than 128 rows with FP8 weights quantize their
    inputs, too, unless they are batch-invariant or this is unsupported (`product_scales`).

    Args:
        codes: uint8, as in `dequantize`.
        scaling: scales and zero points of the codes.
        dtype: data type of the inputs.
        batch_invariant: as in `pack_linear_weight`.
    """
    if registry.uses_triton(codes.device):
        packed = pack_codes(codes, scaling, dtype=dtype)
        if packed is not None:
            scales = None
            if codes.is_cuda and not batch_invariant:
                capability = torch.cuda.get_device_capability(codes.device)
                scales = product_scales(packed, dtype, capability)
            if scales is not None:
                return Fp8Weight(packed, scales)
            return TritonQuantizedWeight(packed, batch_invariant=batch_invariant)
    weight = dequantize(codes, scaling, dtype=dtype)
    return pack_linear_weight(weight, batch_invariant=batch_invariant)


__all__ = [
    "BlockScales",
    "PackedCodes",
    "PackedLinear",
    "WeightCode",
    "dequantize",
    "linear",
    "pack_codes",
    "pack_linear_weight",
    "pack_quantized_linear_weight",
    "quantize_weight",
]
