from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers.activations import XIELUActivation
from transformers.models.llama import modeling_llama

from kernels import (
    Norm,
    clamped_silu_and_mul,
    clamped_swiglu,
    fused_add_norm,
    gelu_and_mul,
    rms_norm,
    silu_and_mul,
    soft_cap_,
    squared_relu,
    xielu,
)
from kernels.qk_norm_rope_store.reference import rotary_embedding, store_kv_cache


def _cos_sin_cache(positions: int, rot_dim: int) -> torch.Tensor:
    inverse = 10000.0 ** -(torch.arange(0, rot_dim, 2) / rot_dim)
    angles = torch.arange(positions)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 32)])
def test_rms_norm_is_hugging_faces(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = modeling_llama.LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    module.weight.copy_(torch.randn(shape[-1]))
    x = torch.randn(shape).to(dtype)
    torch.testing.assert_close(rms_norm(x, module.weight, 1e-5), module(x), rtol=1e-6, atol=1e-6)


def test_a_norm_of_a_sum() -> None:
    x, residual, weight = torch.randn(4, 48), torch.randn(4, 48), torch.randn(48)
    (normed,), total = fused_add_norm(x, residual, (Norm(weight),), 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


def test_norms_around_a_sum() -> None:
    """Norms of a block's output and the residual, three norms of the sum, and a scaled sum."""
    x, residual = torch.randn(2, 4, 48).to(torch.bfloat16)
    weights = torch.randn(5, 48).to(torch.bfloat16)
    (first, second, third), total = fused_add_norm(
        *(x, residual, (Norm(weights[0]), Norm(weights[1], is_fp32=True), Norm(weights[2])), 1e-6),
        x_weight=weights[3],
        residual_weight=weights[4],
        x_scale=0.5,
        total_scale=torch.tensor([2.0]),
    )
    summed = rms_norm(x, weights[3], 1e-6) * 0.5 + rms_norm(residual, weights[4], 1e-6)
    assert torch.equal(total, summed * 2)
    assert torch.equal(first, rms_norm(summed, weights[0], 1e-6))
    assert torch.equal(second, rms_norm(summed, weights[1], 1e-6).float())
    assert torch.equal(third, rms_norm(summed, weights[2], 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(4, 48).to(dtype), torch.randn(48), torch.randn(48)
    norm = Norm(weight, bias, subtracts_mean=True)
    (normed,), total = fused_add_norm(x, None, (norm,), 1e-5)
    assert total is x
    expected = torch.nn.functional.layer_norm(x.double(), (48,), weight.double(), bias.double())
    torch.testing.assert_close(normed, expected.to(dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rot_dim", [32, 16])
@pytest.mark.parametrize("fused", [True, False], ids=["one projection", "separate"])
def test_rotary_is_hugging_faces(fused: bool, rot_dim: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 3, 99, 41])
    cache = _cos_sin_cache(100, rot_dim)
    qkv = torch.randn(4, (4 + 2 + 2) * 32).to(dtype)
    q, k, v = (part.unflatten(1, (-1, 32)) for part in qkv.split([128, 64, 64], dim=1))
    cos, sin = (cache[positions].chunk(2, dim=1)[i].repeat(1, 2).unsqueeze(1) for i in (0, 1))
    expected = []
    for x in (q, k):
        rotated = x[..., :rot_dim].float()
        rotated = rotated * cos + modeling_llama.rotate_half(rotated) * sin
        expected.append(torch.cat((rotated.to(dtype), x[..., rot_dim:]), dim=-1))
    values = v.clone()
    if not fused:
        q, k = q.clone(), k.clone()
    rotary_embedding(q, k, positions, cache)
    torch.testing.assert_close(q, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(k, expected[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(v, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * 53) * 20).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    expected = (gate * gate.sigmoid() * up).to(dtype)
    torch.testing.assert_close(
        silu_and_mul(x), expected, rtol=1e-5 if dtype.itemsize == 4 else 1e-2, atol=1e-6
    )


def test_silu_and_mul_saturates() -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_and_mul(x), torch.tensor([[0.0, 200.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_and_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * 53) * 5).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    expected = (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(dtype)
    torch.testing.assert_close(
        gelu_and_mul(x), expected, rtol=1e-5 if dtype.itemsize == 4 else 1e-2, atol=1e-6
    )
    ends = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]])
    assert torch.equal(gelu_and_mul(ends), torch.tensor([[0.0, 200.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_silu_and_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * 53) * 5).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    expected = ((gate * gate.sigmoid()).clamp(max=3.0) * up.clamp(-3.0, 3.0)).to(dtype)
    torch.testing.assert_close(
        clamped_silu_and_mul(x, 3.0),
        expected,
        rtol=1e-5 if dtype.itemsize == 4 else 1e-2,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * 53) * 5).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    expected = ((up + 1) * gate * (1.7 * gate).sigmoid()).to(dtype)
    torch.testing.assert_close(
        clamped_swiglu(x, 1.7, 3.0), expected, rtol=1e-5 if dtype.itemsize == 4 else 1e-2, atol=1e-6
    )


def test_soft_cap() -> None:
    x = torch.tensor([[-1e5, -30.0, 0.0, 1e-3, 1e5]])
    expected = torch.tensor([[-30.0, -30.0 * math.tanh(1.0), 0.0, 1e-3, 30.0]])
    torch.testing.assert_close(soft_cap_(x, 30.0), expected)
    torch.testing.assert_close(x, expected)  # in place


def test_squared_relu() -> None:
    x = torch.tensor([[-3.0, 0.0, 0.5, 3.0]])
    assert torch.equal(squared_relu(x), torch.tensor([[0.0, 0.0, 0.25, 9.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xielu_is_transformers(dtype: torch.dtype) -> None:
    module = XIELUActivation(dtype=torch.float32)
    p, n = (torch.nn.functional.softplus(alpha) for alpha in (module.alpha_p, module.alpha_n))
    numbers = torch.stack((p[0], module.beta + n[0], module.beta, module.eps)).float()
    x = (torch.randn(7, 53) * 5).to(dtype)
    expected = module._xielu_python(x.float()).to(dtype)
    tolerance = 1e-5 if dtype.itemsize == 4 else 1e-2
    torch.testing.assert_close(xielu(x, numbers), expected, rtol=tolerance, atol=1e-5)


def test_store_kv_cache_writes_only_its_slots() -> None:
    qkv = torch.randn(3, (2 + 2 + 2) * 8)
    k, v = (qkv[:, start : start + 16].view(3, 2, 8) for start in (16, 32))
    k_cache, v_cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    slots = torch.tensor([9, 2, 15])
    store_kv_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(16, 2, 8)[slots], k)
    assert torch.equal(v_cache.view(16, 2, 8)[slots], v)
    assert int(k_cache.view(16, -1).any(dim=1).sum()) == 3


def _rotated(x: torch.Tensor) -> torch.Tensor:
    heads = x[:, : x.shape[1] // 8 * 8].unflatten(1, (-1, 8)).clone()
    q, k = heads[:, :1], heads[:, 1:]
    positions = x[:, 0].abs().mul(10).long()
    rotary_embedding(q, k, positions, _cos_sin_cache(1000, 8))
    return heads


def _normed_around(x: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-1.0, 1.0, x.shape[1])
    norm = Norm(weight, weight, subtracts_mean=True)
    options = {"x_weight": weight, "residual_weight": weight, "total_scale": weight[:1]}
    (normed,), total = fused_add_norm(x, x * 0.3, (norm,), 1e-5, x_scale=0.7, **options)
    return torch.cat((normed, total), dim=1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [40, 94, 250, 1406])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: rms_norm(x, torch.ones(x.shape[1]), 1e-5),
        lambda x: fused_add_norm(x, x * 0.3, (Norm(torch.ones(x.shape[1])),), 1e-5)[0][0],
        _normed_around,
        silu_and_mul,
        gelu_and_mul,
        lambda x: clamped_swiglu(x, 1.702, 0.5),
        _rotated,
    ],
    ids=[
        *("rms_norm", "fused_add_norm", "norms around a sum", "silu_and_mul", "gelu_and_mul"),
        *("clamped_swiglu", "rotary_embedding"),
    ],
)
def test_rows_do_not_depend_on_their_neighbours(
    op: Callable[[torch.Tensor], torch.Tensor], width: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(403, width) * 3
    whole = op(x)
    for rows in (1, 2, 3, 17, 65, 211):
        start = int(torch.randint(0, len(x) - rows + 1, ()))
        assert torch.equal(op(x[start : start + rows].clone()), whole[start : start + rows])
