"""Quantized weights: 8-bit or 4-bit codes, with a scale per block of a row's input features."""

from __future__ import annotations

import torch

from kernels.linear.base import HALF_BYTES, BlockScales, PackedLinear, WeightCode
from kernels.linear.packed_codes import PackedCodes
from kernels.quantize_fp8.base import LARGEST, LEAST_MAXIMUM

_VALUES_AT_ONCE = 1 << 26
"""Maximum number of values that are quantized at a time, which limits temporary memory."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(codes: torch.Tensor, scaling: BlockScales, *, dtype: torch.dtype) -> torch.Tensor:
    """Dequantized weights [..., N, K] in `dtype`, rounded once.

    Args:
        codes: uint8 [..., N, K], or [..., N, K / 2] for 4-bit codes, the first one in the low bits.
        scaling: scales and zero points of the codes.
        dtype: data type of the result.
    """
    values = _decode(codes, scaling.code)
    columns = torch.arange(values.shape[-1], device=codes.device).add_(scaling.offset)
    blocks = columns // scaling.block
    if scaling.zeros is not None:
        values -= scaling.zeros.index_select(-1, blocks)
    return (values * scaling.scales.index_select(-1, blocks)).to(dtype)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, BlockScales]:
    """Quantizes a weight [..., N, K] to FP8 (e4m3), with a scale per output feature.

    Returns:
        Codes, uint8 [..., N, K], and their scales.
    """
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = weight.abs().amax(dim=-1, keepdim=True).float().clamp_(min=LEAST_MAXIMUM) / LARGEST
    depth = weight.shape[-1]
    at_once = max(1, _VALUES_AT_ONCE // depth)
    parts = (values.reshape(-1, values.shape[-1]).split(at_once) for values in (weight, scales))
    for rows, factors, out in zip(*parts, codes.view(-1, depth).split(at_once), strict=True):
        out.copy_(rows / factors)
    return codes.view(torch.uint8), BlockScales(scales, depth, 0)


def _decode(codes: torch.Tensor, code: WeightCode) -> torch.Tensor:
    """Values of codes before zero points and scales, in a new tensor: fp32 [..., N, K]."""
    if code in HALF_BYTES:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    if code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if code == "int8":
        return codes.view(torch.int8).float()
    if code == "e2m1":
        table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device=codes.device)
        return table[codes.int()]
    return codes.float() - {"uint4": 0.0, "uint4b8": 8.0, "uint8": 0.0, "uint8b128": 128.0}[code]


class TritonQuantizedWeight(PackedLinear):
    """A quantized weight on CUDA, dequantized tile by tile within the matmul.

    Args:
        weight: the packed weight [N, K].
        batch_invariant: whether a row's result must not depend, bitwise, on the number of rows.
    """

    def __init__(self, weight: PackedCodes, *, batch_invariant: bool = False) -> None:
        from kernels.linear.triton_split import count_arrivals

        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._arrived = count_arrivals(weight.words.device)
        self._batch_invariant = batch_invariant

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes up to 256 rows in one launch. For more, dequantizes the whole weight first,
        except in batch-invariant mode."""
        from kernels.linear.triton_packed import multiply_packed

        return multiply_packed(
            x, self._weight, bias, self._arrived, batch_invariant=self._batch_invariant
        )
