"""Products of FP8 weights with FP8 activations, on CPU: what scaled_mm reads, and its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from kernels.linear import BlockScales, dequantize, pack_codes, scaled
from kernels.linear.scaled import Fp8Weight, ProductScales, product_scales
from kernels.quantize_fp8 import quantize_fp8
from tests.support.kernels.experts import make_codes

DTYPE = torch.bfloat16
HOPPER, ADA, BLACKWELL = (9, 0), (8, 9), (10, 0)


def make_weight(
    columns: int, depth: int, *, by_block: bool, shared_rows: int = 128
) -> tuple[torch.Tensor, BlockScales]:
    """Codes of all numbers; scales of a row, or of blocks of 128 features that rows share."""
    block = 128 if by_block else 2 * depth
    codes, scaling = make_codes(
        columns, depth, code="e4m3", block=block, offset=0, scale=0.5 / depth
    )
    if by_block:
        first = scaling.scales[::shared_rows]
        scales = first.repeat_interleave(shared_rows, dim=0)[:columns].contiguous()
        scaling = scaling._replace(scales=scales, rows=shared_rows)
    return codes, scaling


def multiply_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    a_recipe: ScalingType,
    b_scales: torch.Tensor,
    b_recipe: ScalingType,
    *,
    output_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """torch's product with scales per block, which CPUs lack, with the conditions that it checks on
    Hopper (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    assert (a_recipe, b_recipe) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    (rows, depth), columns, blocks = a.shape, b.shape[1], a.shape[1] // 128
    assert a.is_contiguous()
    assert b.stride() == (1, depth)
    assert rows % 16 == columns % 128 == depth % 128 == 0
    assert (a_scales.shape, a_scales.stride()) == ((rows, blocks), (1, rows))
    padded = -(-blocks // 4) * 4
    assert (b_scales.shape, b_scales.stride()) == ((padded, columns // 128), (1, padded))
    left = a.double() * a_scales.repeat_interleave(128, 1)
    right = b.double() * b_scales[:blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert not use_fast_accum
    return (left @ right).to(output_dtype)


@pytest.mark.parametrize("by_block", [False, True], ids=["rows", "blocks"])
def test_errors_are_those_of_the_activations_format(
    by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most half a step of e4m3 for each activation: 1/16 of it, or of the smallest numbers
    2 ** -10 of the scale, which is 1/448 of the largest number of its row or block."""
    torch.manual_seed(0)
    shape = (256, 640) if by_block else (48, 200)
    codes, scaling = make_weight(*shape, by_block=by_block)
    packed = pack_codes(codes, scaling, dtype=DTYPE)
    assert packed is not None
    scales = product_scales(packed, DTYPE, HOPPER)
    assert scales is not None
    assert scales.by_block == by_block
    if by_block:
        monkeypatch.setattr(scaled, "scaled_mm", multiply_blocks)
    x, bias = torch.randn(131, shape[1]).to(DTYPE), torch.randn(shape[0]).to(DTYPE)
    x[3] *= 1000.0
    actual = Fp8Weight(packed, scales).multiply(x, bias).double()
    weight = dequantize(codes, scaling, dtype=torch.float32).double()
    expected = x.double() @ weight.T + bias.double()
    rounding = x.double().abs() / 16 + x.double().abs().amax(1, keepdim=True) / 448 / 1024
    bound = rounding @ weight.abs().T + 2**-7 * expected.abs() + 1e-6
    assert actual.shape == expected.shape
    assert bool(((actual - expected).abs() <= bound).all())
    # Errors largely cancel each other.
    error = (actual - expected)[4:].norm() / (expected - bias.double())[4:].norm()
    assert error < 0.04


def scales_of(
    columns: int, depth: int, capability: tuple[int, int] = HOPPER, **options: Any
) -> ProductScales | None:
    dtype = options.pop("dtype", DTYPE)
    packed = pack_codes(*make_weight(columns, depth, **options), dtype=dtype)
    assert packed is not None
    return product_scales(packed, dtype, capability)


def test_other_shapes_types_and_devices_keep_their_activations() -> None:
    for capability in (ADA, HOPPER, BLACKWELL):
        assert scales_of(48, 200, capability, by_block=False) is not None
        is_hopper = capability == HOPPER
        assert (scales_of(256, 256, capability, by_block=True) is not None) == is_hopper
    assert scales_of(48, 200, (8, 0), by_block=False) is None
    assert scales_of(40, 200, by_block=False) is None
    assert scales_of(48, 200, by_block=False, dtype=torch.float16) is None
    assert scales_of(192, 256, by_block=True) is None
    assert scales_of(256, 192, by_block=True) is None
    assert scales_of(256, 256, by_block=True, shared_rows=64) is None


def test_rows_are_padded_and_scaled_to_the_largest_number() -> None:
    x = torch.randn(5, 200).to(DTYPE)
    x[1] = 0.0
    for by_block in (False, True):
        codes, scales, num_rows = quantize_fp8(x, by_block=by_block)
        assert num_rows == 5
        assert scales.stride() == ((1, 16) if by_block else (1, 1)), "as scaled_mm checks"
        assert codes.shape == (16, 256)
        assert scales.shape == (16, 2 if by_block else 1)
        assert not codes[5:].float().any()
        values = codes.float().unflatten(1, (-1, 2, 2)).transpose(2, 3).reshape(16, 256)
        assert float(values[0].abs().max()) == 448.0
        values = values * (scales.repeat_interleave(128, 1) if by_block else scales)
        assert not values[1].any()
        torch.testing.assert_close(values[:5, :200], x.float(), rtol=1 / 16, atol=1e-5)
