"""FP8 caches and activations of the Triton kernels and the torch references; run as
`triton_cases`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from kernels import (
    GELU,
    SILU,
    Activation,
    Fp8Rows,
    HeadNorms,
    LatentRows,
    Norm,
    activate_fp8,
    attend_to_cells,
    fused_add_norm,
    fused_add_norm_fp8,
    linear,
    pack_quantized_linear_weight,
    prepare_latents,
    qk_norm_rope_store,
    registry,
)
from kernels.fused_moe import (
    ExpertChoice,
    Experts,
    ExpertWeights,
    fused_moe,
    pack_quantized_experts,
)
from kernels.linear import BlockScales, dequantize
from kernels.quantize_fp8 import quantize_fp8
from tests.support.effort import is_thorough
from tests.support.kernels.experts import make_codes
from tests.support.kernels.paged_cases import make_paged

FP8 = torch.float8_e4m3fn
_MODES: tuple[tuple[Literal["torch", "triton"], bool], ...] = (
    ("torch", False),
    ("torch", True),
    ("triton", False),
    ("triton", True),
)
"""Implementations, and whether they are batch-invariant."""
_STEP = 2.0**-9
"""Smallest number in e4m3."""


def fp8_attention_case(device: str, dtype: torch.dtype) -> None:
    """Checks that attention over an FP8 cache is bitwise equal to attention over its values in the
    queries' type, with the scales applied: windows, sinks, caps, latents, and batch-invariant mode.
    """
    _skip_without_fp8(device)
    few = ((6, 40, 0, 0, 0.0, False), (4, 32, 0, 37, 0.7, True), (5, 44, 36, 0, 0.0, False))
    more = ((4, 64, 0, 37, 0.0, True), (4, 32, 0, 0, 0.7, False))
    shapes = few + more if is_thorough(device) else few
    for heads, head_dim, value_dim, window, cap, has_sinks in shapes:
        # Several splits of keys only in the first shape, which is also computed batch-invariantly.
        is_long = head_dim == 40 or is_thorough(device)
        lens, query_lens = [1, 37, 300 if is_long else 60], [1, 20, 6]
        drawn = make_paged(
            lens,
            num_kv_heads=1 if value_dim else 2,
            head_dim=head_dim,
            value_dim=value_dim,
            device=device,
            dtype=dtype,
            cap=cap,
        )
        if has_sinks:
            drawn.sinks = 2 * torch.randn(heads).to(device)
        case = drawn.in_fp8(0.75, 0.5)
        value_scale = case.value_scale
        plain = replace(
            case,
            k_cache=case.k_cache.to(dtype),
            v_cache=case.v_cache.to(dtype),
            value_scale=1.0,
        )
        if value_dim:
            plain.v_cache = plain.k_cache[..., :value_dim]
        q = torch.randn(sum(query_lens), heads, head_dim).to(device, dtype)
        for ops, invariant in _MODES:
            if invariant and (head_dim != 40 or (ops == "torch" and device != "cpu")):
                continue
            with registry.using(ops):
                pairs = [
                    (
                        one.decode(q[:3], window=window, batch_invariant=invariant),
                        one.extend(q, query_lens, window=window, batch_invariant=invariant),
                    )
                    for one in (case, plain)
                ]
            for own, expected in zip(*pairs, strict=True):
                torch.testing.assert_close(own, expected * value_scale, rtol=1e-2, atol=1e-5)
                # A power of two, and the interpreter fuses nothing.
                if device == "cpu" and value_scale == 0.5:
                    assert torch.equal(own, expected * value_scale)


def fp8_sparse_attention_case(device: str, dtype: torch.dtype) -> None:
    """Checks that attention over selected latents in an FP8 cache is bitwise equal to attention
    over its values."""
    _skip_without_fp8(device)
    drawn = make_paged([90], num_kv_heads=1, head_dim=44, value_dim=36, device=device, dtype=dtype)
    quantized = drawn.in_fp8(0.5)
    plain = quantized.k_cache.to(dtype)
    q = torch.randn(2, 5, 44).to(device, dtype)
    cells = torch.tensor([[3, 70, 41], [1, 88, -1]], dtype=torch.int32, device=device)
    factors = quantized.scale, quantized.value_scale
    for name in ("torch", "triton"):
        with registry.using(name):
            found, expected = (
                attend_to_cells(q, cache, cells, 36, scale=factors[0], value_scale=factors[1])
                for cache in (quantized.k_cache, plain)
            )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def fp8_store_case(device: str, dtype: torch.dtype) -> None:
    """Checks both kernels that store to caches: numbers divided by the scales, and clamped."""
    _skip_without_fp8(device)
    slots, positions = (torch.tensor(n, device=device) for n in ([5, 17, 0, 31], [0, 7, 49, 7]))
    heads, table = torch.randn(4, 12, 40).to(device, dtype), torch.randn(50, 24, device=device)
    heads[1, 10, 3] = 3e4  # a value beyond the range
    weights = torch.randn(2, 40).to(device)
    latents = torch.randn(4, 64).to(device, dtype)

    def store() -> torch.Tensor:
        q, k, v = heads.clone().split((8, 2, 2), dim=1)
        caches = torch.zeros(2, 4, 8, 2, 40, device=device, dtype=FP8)
        qk_norm_rope_store(
            *(q, k, v, (caches[0], caches[1]), slots),
            positions=positions,
            cos_sin_cache=table,
            norms=HeadNorms(weights[0], weights[1], 1e-5),
            cache_scales=(0.03, 0.5),
        )
        return caches

    def store_latents() -> torch.Tensor:
        cache = torch.zeros(4, 8, 1, 64, device=device, dtype=FP8)
        row = latents.clone()
        prepare_latents(
            torch.zeros(4, 2, 32, device=device, dtype=dtype),
            torch.zeros(4, 2, 64, device=device, dtype=dtype),
            LatentRows(row[:, :40], row[:, 40:], weights[0], 1e-5),
            *(cache, slots),
            positions=positions,
            cos_sin_cache=table,
            cache_scale=0.25,
        )
        return cache

    stored = _both_ways(store)[0]
    cells = stored[1].view(32, 2, 40)[slots].float()
    assert cells[1, 0, 3] == 448.0, "clamped"
    torch.testing.assert_close(0.5 * cells[0], heads[0, 10:].float(), rtol=2**-4, atol=_STEP)
    _both_ways(store_latents)


def quantize_fp8_case(device: str, dtype: torch.dtype) -> None:
    """Checks a scale per row or per block; rows that are slices of wider ones, rows of zeros, and
    padding."""
    _skip_without_fp8(device)
    for rows, depth in ((5, 200), (17, 1284), (1, 4096)):
        x = torch.randn(rows, depth + 8).to(device, dtype)[:, :depth]
        x[0] = 0.0
        for by_block in (False, True):
            scales: list[torch.Tensor] = []

            def run(
                x: torch.Tensor = x,
                by_block: bool = by_block,
                scales: list[torch.Tensor] = scales,
            ) -> torch.Tensor:
                quantized = quantize_fp8(x, by_block=by_block)
                scales.append(quantized.scales)
                return quantized.codes

            _both_ways(run)
            torch.testing.assert_close(*scales, rtol=1e-6, atol=0.0)


def fused_quantization_case(device: str, dtype: torch.dtype) -> None:
    """Checks that norms and activations that quantize their results are bitwise equal to a separate
    `quantize_fp8`, in both implementations: rows that are slices of wider ones, and sizes that fill
    no block. In a brief run, every other one is quantized by block and the others by row."""
    _skip_without_fp8(device)
    dtype = torch.bfloat16
    x, residual = (torch.randn(5, 210).to(device, dtype)[:, :200] for _ in range(2))
    weights = torch.randn(2, 200).to(device, dtype)
    plain, mean = Norm(weights[0]), Norm(weights[1].float(), weights[0].float(), True)
    sums: tuple[tuple[torch.Tensor | None, Norm, torch.Tensor | None, float], ...] = (
        (residual, plain, None, 1.0),
        (None, plain, None, 1.0),
        (residual, plain, weights[1], 0.3),
        (residual + 3.0, mean, None, 1.0),
    )
    activations = SILU, GELU, Activation("clamped", 1.702, 7.0), Activation("clamped silu", 0, 7.0)
    both = 4.0 * torch.randn(3, 2 * 1092).to(device, dtype)
    for ops, by_block in itertools.product(("torch", "triton"), (False, True)):
        with registry.using("torch" if ops == "torch" else "triton"):
            for number, (added, norm, weight, scale) in enumerate(sums):
                if number % 2 == by_block and not is_thorough(device):
                    continue
                rows, total = fused_add_norm_fp8(
                    x, added, norm, 1e-5, by_block=by_block, x_weight=weight, x_scale=scale
                )
                (normed,), expected = fused_add_norm(
                    x, added, (norm,), 1e-5, x_weight=weight, x_scale=scale
                )
                assert torch.equal(total, expected)
                _assert_same_rows(rows, quantize_fp8(normed, by_block=by_block))
            for number, activation in enumerate(activations):
                if number % 2 == by_block and not is_thorough(device):
                    continue
                rows = activate_fp8(both, activation, by_block=by_block)
                _assert_same_rows(rows, quantize_fp8(activation(both), by_block=by_block))


def _assert_same_rows(rows: Fp8Rows, expected: Fp8Rows) -> None:
    assert rows.num_rows == expected.num_rows
    assert torch.equal(rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(rows.scales, expected.scales)
    assert rows.scales.stride() == expected.scales.stride()


def fp8_product_case(device: str, dtype: torch.dtype) -> None:
    """Checks FP8 matmuls with many rows, which need a GPU, against the dequantized weight."""
    if device == "cpu" or dtype != torch.bfloat16 or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products need bfloat16 and a GPU of compute capability 8.9")
    for columns, depth, block in ((48, 200, 400), (512, 640, 1280), (256, 640, 128)):
        codes, scaling = make_codes(columns, depth, code="e4m3", block=block, offset=0)
        scales = scaling.scales[::128].repeat_interleave(128, 0)[:columns].contiguous()
        scaling = BlockScales(scales.to(device), block, 0, rows=128)
        weight = pack_quantized_linear_weight(codes.to(device), scaling, dtype=dtype)
        plain = dequantize(codes.to(device), scaling, dtype=torch.float32)
        for rows in (129, 1000):
            x, bias = (torch.randn(*size).to(device, dtype) for size in ((rows, depth), (columns,)))
            expected = x.float() @ plain.T
            error = linear(x, weight, bias).float() - expected - bias.float()
            assert error.norm() < 0.04 * expected.norm(), (columns, block, rows)


def fp8_experts_case(device: str, dtype: torch.dtype) -> None:
    """Checks experts with FP8 inputs against the dequantized weights: scales per output feature and
    per block, tiles of 64 and 128 rows; sizes that fill no tile, and another rank's expert."""
    _skip_without_fp8(device)
    from kernels.fused_moe import triton_kernel

    dtype = torch.bfloat16
    for tokens, block in ((40, 999), (70, 128)):  # 64 and 128 rows
        hidden, inner, quantized, plain = 200, 136, [], []
        for shape in ((3, 2 * inner, hidden), (3, hidden, inner)):
            codes, scaling = make_codes(
                *shape, code="e4m3", device=device, block=block, offset=0, scale=0.001
            )
            weights = ExpertWeights(codes, scaling)
            with registry.using("triton"):
                quantized.append(pack_quantized_experts(weights, dtype))
            plain.append(ExpertWeights(dequantize(codes, scaling, dtype=torch.float32)))
        x = torch.randn(tokens, hidden).to(device, dtype)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).to(device)
        choice = ExpertChoice(ids, torch.rand(tokens, 2, device=device))
        with registry.using("torch"):
            expected = fused_moe(x.float(), Experts(*plain), choice)
        with registry.using("triton"), pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                patch.setattr(triton_kernel, "compute_capability", lambda: 90)
            calls: list[bool] = []
            patch.setattr(
                triton_kernel,
                "quantize_fp8",
                lambda x, *, by_block, calls=calls: (
                    calls.append(by_block) or quantize_fp8(x, by_block=by_block)
                ),
            )
            actual = fused_moe(x, Experts(*quantized), choice)
        assert calls == 2 * [block == 128]
        error = (actual.float() - expected).norm() / expected.norm()
        assert error < 0.06, (tokens, block, error)


def _both_ways(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache as stored by the reference and by Triton. Asserts that at most a few values, near the
    middle between two codes, are rounded differently, and by one step."""
    caches = []
    for ops in ("torch", "triton"):
        with registry.using(ops):
            caches.append(run())
    expected, found = (cache.float() for cache in caches)
    torch.testing.assert_close(found, expected, rtol=2**-3, atol=_STEP)
    assert (found != expected).float().mean() < 0.01
    return caches[0], caches[1]


def _skip_without_fp8(device: str) -> None:
    if device != "cpu" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 caches need compute capability 8.9")


FP8_CASES = [
    fp8_attention_case,
    fp8_sparse_attention_case,
    fp8_store_case,
    quantize_fp8_case,
    fused_quantization_case,
    fp8_product_case,
    fp8_experts_case,
]
