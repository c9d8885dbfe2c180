"""Triton kernels against the torch references; run by the interpreter (fp32) and on a GPU."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch

from kernels import (
    HeadNorms,
    LatentRows,
    NgramLookup,
    Norm,
    Routing,
    choose_experts,
    clamped_silu_and_mul,
    clamped_swiglu,
    draft_ngrams,
    fused_add_norm,
    gelu_and_mul,
    gumbel_noise,
    pack_quantized_experts,
    prepare_latents,
    qk_norm_rope_store,
    registry,
    rms_norm,
    rms_norm_pair,
    silu_and_mul,
    soft_cap_,
    squared_relu,
    xielu,
)
from kernels.attention import AttentionMetadata
from kernels.attention.triton_backend import TritonAttention
from kernels.attention.triton_config import extend_blocks
from kernels.fused_moe import (
    GELU,
    SQUARED_RELU,
    Activation,
    ExpertBiases,
    ExpertChoice,
    Experts,
    ExpertWeights,
    ExtraTerms,
    fused_moe,
)
from kernels.linear import WeightCode, dequantize, pack_codes
from kernels.linear.quantized import TritonQuantizedWeight
from kernels.linear.skinny import SkinnyWeight
from kernels.linear.tiled import TritonTiledWeight
from tests.support.effort import is_thorough
from tests.support.kernels.block_cases import BLOCK_CASES
from tests.support.kernels.delta_cases import DELTA_CASES
from tests.support.kernels.experts import make_codes, make_experts, make_quantized_experts
from tests.support.kernels.fp8_cases import FP8_CASES
from tests.support.kernels.kimi_cases import KIMI_CASES
from tests.support.kernels.lora_cases import LORA_CASES
from tests.support.kernels.mla_cases import MLA_CASES
from tests.support.kernels.paged_cases import Paged, make_paged, naive_decode
from tests.support.kernels.sampling_cases import SAMPLING_CASES
from tests.support.kernels.scan_cases import SCAN_CASES
from tests.support.kernels.schedule_cases import SCHEDULE_CASES
from tests.support.kernels.sparse_cases import SPARSE_CASES

Case = Callable[[str, torch.dtype], None]


def _compare(
    run: Callable[[], torch.Tensor | Sequence[torch.Tensor]],
    dtype: torch.dtype,
    tolerance: float = 2e-5,
    reference: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Compares one output, or each of several, including their data types."""
    with registry.using("torch"):
        expected = (reference or run)()
    with registry.using("triton"):
        actual = run()
    if dtype != torch.float32:
        tolerance = 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _randn(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def rms_norm_case(device: str, dtype: torch.dtype) -> None:
    for shape in ((5, 96), (3, 4, 40)):
        x = _randn(*shape, device=device, dtype=dtype)
        weight = _randn(shape[-1], device=device, dtype=dtype)
        _compare(partial(rms_norm, x, weight, 1e-5), dtype)
    heads = _randn(3, 6 * 32, device=device, dtype=dtype)[:, : 4 * 32].view(3, 4, 32)
    weight = _randn(32, device=device, dtype=dtype)
    _compare(lambda: rms_norm(heads, weight, 1e-6), dtype)


def rms_norm_pair_case(device: str, dtype: torch.dtype) -> None:
    """Checks slices of wider rows; one slice is several times as wide as the block of the other
    one."""
    first, second, _ = _randn(5, 380, device=device, dtype=dtype).split([300, 40, 40], dim=1)
    weights = [_randn(size, device=device, dtype=dtype) for size in (300, 40)]

    _compare(lambda: rms_norm_pair(first, second, (weights[0], weights[1]), 1e-5), dtype)


def fused_add_norm_case(device: str, dtype: torch.dtype) -> None:
    """Checks no norm, one and three norms of a sum, of both kinds and types; norms and factors of
    the addends and of the sum, and no sum; rows that are slices of wider ones."""
    x, residual = (_randn(5, 90, device=device, dtype=dtype)[:, :72] for _ in range(2))
    weights = _randn(3, 72, device=device, dtype=dtype)
    bias = torch.randn(72).to(device)
    some = (Norm(weights[0]), Norm(bias, is_fp32=True), Norm(weights[1]))
    mean = Norm(bias, bias.flip(0), subtracts_mean=True)
    unbiased = mean._replace(bias=None, is_fp32=True)
    scale = torch.rand(1).to(device, dtype)
    cases: list[tuple[torch.Tensor | None, tuple[Norm, ...], dict[str, Any]]] = [
        (residual, some[:1], {}),
        (residual, some[:2], {"x_scale": 0.3}),
        (residual, some, {"x_weight": weights[2], "total_scale": scale}),
        (residual, some[:1], {"x_weight": weights[2], "residual_weight": weights[1]}),
        (residual, (), {"x_weight": weights[2]}),
        (residual, (mean,), {}),
        (None, (mean,), {}),
        (residual + 3.0, (unbiased, unbiased._replace(is_fp32=False)), {}),
    ]
    for added, norms, options in cases:

        def run(
            added: torch.Tensor | None = added,
            norms: tuple[Norm, ...] = norms,
            options: dict[str, Any] = options,
        ) -> tuple[torch.Tensor, ...]:
            outputs, total = fused_add_norm(x, added, norms, 1e-5, **options)
            return (*outputs, total)

        _compare(run, dtype)


def silu_and_mul_case(device: str, dtype: torch.dtype) -> None:
    x = _randn(4, 2 * 1100, device=device, dtype=dtype)
    _compare(lambda: silu_and_mul(x), dtype)


def gelu_and_mul_case(device: str, dtype: torch.dtype) -> None:
    x = _randn(4, 2 * 1100, device=device, dtype=dtype)
    _compare(lambda: gelu_and_mul(x), dtype)


def clamped_swiglu_case(device: str, dtype: torch.dtype) -> None:
    x = 9.0 * _randn(4, 2 * 1100, device=device, dtype=dtype)
    _compare(lambda: clamped_swiglu(x, 1.702, 7.0), dtype)
    _compare(lambda: clamped_silu_and_mul(x, 7.0), dtype)


def soft_cap_case(device: str, dtype: torch.dtype) -> None:
    """Checks soft caps of logits, which are always fp32; for some logits, exp overflows."""
    x = 60.0 * _randn(4, 1100, device=device, dtype=torch.float32)
    x[0, :3] = torch.tensor([5e4, -5e4, 0.0])
    _compare(lambda: soft_cap_(x.clone()[:, :1099], 30.0), torch.float32)


def squared_relu_case(device: str, dtype: torch.dtype) -> None:
    x = _randn(4, 2 * 1100, device=device, dtype=dtype)[:, :1100]
    _compare(lambda: squared_relu(x), dtype)


def xielu_case(device: str, dtype: torch.dtype) -> None:
    """Checks elements of all magnitudes, including those near 0, where precision is lost, and those
    whose exp is 0; limits below and at 0."""
    x = torch.cat((torch.linspace(-200, 9, 1000), -torch.logspace(-9, 1, 1100)))
    x = x.view(3, 700).to(device, dtype)
    for limit in (-1e-6, -0.7, 0.0):
        numbers = torch.tensor([0.8, 1.3, 0.5, limit]).to(device)
        _compare(partial(xielu, x, numbers), dtype)
    falling = torch.tensor([0.8, 1.3, 0.0, 0.0]).to(device)
    near = -torch.logspace(-2, 1, 50).view(1, 50).to(device, dtype)
    wide = near.double()
    expected = 1.3 * (torch.expm1(wide) - wide)
    with registry.using("triton"):
        ratio = xielu(near, falling).double() / expected
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=tolerance, atol=0)


def qk_norm_rope_store_case(device: str, dtype: torch.dtype) -> None:
    """More and fewer heads than in a program, or queries alone; full, partial and no rotary
    embedding; norms before and after, also of values, with weights of another type; values narrower
    than keys; scaled queries. Not thoroughly, each pair of these."""
    slots, positions = (torch.tensor(n, device=device) for n in ([5, 17, 0, 31], [0, 7, 49, 7]))
    all_heads, rotary_dims = ((20, 2), (9, 9), (2, 1), (3, 0)), (24, 40, None)
    for heads, rotary, number in itertools.product(range(4), range(3), range(3)):
        if (heads + rotary + number) % 3 and not is_thorough(device):
            continue
        (num_q, num_k), rotary_dim = all_heads[heads], rotary_dims[rotary]
        table = None if rotary_dim is None else torch.randn(50, rotary_dim, device=device)
        norms: HeadNorms | None = None
        if number:
            weights = torch.randn(2, 40).to(device)
            options = {"after_rotation": number == 2, "of_values": num_q == 9}
            norms = HeadNorms(weights[0], weights[1], 1e-5, **options)
        scale = torch.rand(50).to(device) if num_q == 2 else None
        qkv = _randn(4, (num_q + 2 * num_k) * 40, device=device, dtype=dtype)

        def run(
            qkv: torch.Tensor = qkv,
            sizes: tuple[int, ...] = (num_q, num_k, num_k),
            table: torch.Tensor | None = table,
            norms: HeadNorms | None = norms,
            scale: torch.Tensor | None = scale,
        ) -> tuple[torch.Tensor, ...]:
            q, k, v = qkv.clone().unflatten(1, (-1, 40)).split(sizes, dim=1)
            v = v[..., : 24 if sizes[1] == 2 else 40]
            caches = [
                torch.zeros(4, 8, *heads.shape[1:], device=device, dtype=dtype) for heads in (k, v)
            ]
            q = qk_norm_rope_store(
                *(q, k, v, (caches[0], caches[1]), slots),
                positions=positions,
                cos_sin_cache=table,
                norms=norms,
                query_scale=scale,
            )
            return q, *caches

        _compare(run, dtype)


def prepare_latents_case(device: str, dtype: torch.dtype) -> None:
    """Checks more and fewer heads than in a program; queries that are slices of wider rows, scaled
    or not; in place or not; a weight of another type; no rotary embedding."""
    slots, positions = (torch.tensor(n, device=device) for n in ([5, 17, 0, 31], [0, 7, 49, 7]))
    table, weight = torch.randn(50, 20, device=device), torch.randn(44).to(device)
    factors = torch.rand(50).to(device)
    for num_heads, scale, in_place, rotates in (
        (21, None, False, True),
        (5, factors, False, True),
        (2, factors, True, True),
        (5, None, False, False),
    ):
        row = _randn(4, num_heads * 32 + 44 + 20, device=device, dtype=dtype)

        def run(
            row: torch.Tensor = row,
            num_heads: int = num_heads,
            scale: torch.Tensor | None = scale,
            in_place: bool = in_place,
            cos_sin: torch.Tensor | None = table if rotates else None,
        ) -> tuple[torch.Tensor, ...]:
            q, latents, rotating = row.clone().split([num_heads * 32, 44, 20], dim=1)
            q = q.unflatten(1, (num_heads, 32))
            cache = torch.zeros(4, 8, 1, 64, device=device, dtype=dtype)
            queries = torch.zeros(4, num_heads, 64, device=device, dtype=dtype)
            own = None if in_place else queries
            prepare_latents(
                *(q, own, LatentRows(latents, rotating, weight, 1e-5), cache, slots),
                positions=positions,
                cos_sin_cache=cos_sin,
                query_scale=scale,
            )
            return cache, q if in_place else q[..., :12], queries

        _compare(run, dtype)


def gumbel_case(device: str, dtype: torch.dtype) -> None:
    from kernels.gumbel_noise import reference
    from kernels.gumbel_noise.triton_kernel import hash_bits

    seeds = torch.tensor([0, 1, -1, 2**40 + 5, -(2**62)], device=device)
    positions = torch.tensor([0, 1, 2**31 - 1, 77, 1000], device=device)
    assert torch.equal(
        hash_bits(seeds, positions, 1500), reference.hash_bits(seeds, positions, 0, 1500)
    )
    _compare(lambda: gumbel_noise(seeds, positions, 1500), torch.float32, 5e-6)


def linear_case(device: str, dtype: torch.dtype) -> None:
    weight = _randn(150, 70, device=device, dtype=dtype)
    bias = _randn(150, device=device, dtype=dtype)
    x = _randn(75, 70, device=device, dtype=dtype)
    packed = TritonTiledWeight(weight)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    expected = x @ weight.t() + bias
    whole = packed.multiply(x, bias)
    torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
    if device == "cpu":
        return  # the interpreter multiplies by BLAS, which rounds by a row's place in a tile
    for start, stop in ((0, 1), (3, 20), (74, 75), (30, 70)):
        assert torch.equal(packed.multiply(x[start:stop], bias), whole[start:stop])


def skinny_linear_case(device: str, dtype: torch.dtype) -> None:
    """Checks that matmuls with few rows, with and without split input features, equal torch's and
    are bitwise reproducible. Rows need not be contiguous."""
    if dtype == torch.float32:  # the interpreter, which multiplies no bfloat16
        dtype = torch.float16
    for rows, shape in ((1, (64, 128)), (17, (128, 640)), (50, (64, 512)), (99, (192, 384))):
        weight = _randn(*shape, device=device, dtype=dtype)
        bias = _randn(shape[0], device=device, dtype=dtype)
        x = _randn(rows, shape[1] + 8, device=device, dtype=dtype)[:, : shape[1]]
        expected = x.double() @ weight.double().T + bias.double()
        product = SkinnyWeight(weight)
        for _ in range(2):  # counters of splits are zeros again
            actual = product.multiply(x, bias)
            assert (actual - expected).abs().max() < 1e-2 * expected.abs().max(), rows
        assert torch.equal(product.multiply(x, bias), actual)
        plain = product.multiply(x, None) + bias.double()
        assert (plain - expected).abs().max() < 1e-2 * expected.abs().max(), rows
    assert torch.equal(product.multiply(x[:0], None), x.new_empty(0, 192))


def quantized_linear_case(device: str, dtype: torch.dtype) -> None:
    """Matmuls equal those with the dequantized weight and are bitwise reproducible: all codes, in
    groups of fewer features than a tile (the first starting before the first feature), of a tile,
    of several tiles and of all features; any number of rows, including numbers for which weights
    are dequantized first and for which input features are split."""
    for number, code in enumerate(get_args(WeightCode)):
        groups = (5, 32, 16), (17, 128, 0)
        for rows, block, offset in groups if is_thorough(device) else groups[number % 2 :][:1]:
            _compare_quantized(code, rows, (70, 300), block, offset, device, dtype)
    for rows, block, offset in ((1, 128, 0), (64, 256, 128), (130, 64, 0), (17, 16, 0)):
        _compare_quantized("uint4", rows, (130, 520), block, offset, device, dtype)
    for rows, block in ((3, 999), (257, 999), (257, 128), (257, 32)):
        _compare_quantized("e4m3", rows, (70, 300), block, 0, device, dtype)


def _compare_quantized(
    code: WeightCode,
    rows: int,
    shape: tuple[int, int],
    block: int,
    offset: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    codes, scaling = make_codes(*shape, code=code, device=device, block=block, offset=offset)
    packed = pack_codes(codes, scaling, dtype=dtype)
    assert packed is not None
    x, bias = (_randn(*size, device=device, dtype=dtype) for size in ((rows, shape[1]), shape[:1]))
    weight = dequantize(codes, scaling, dtype=torch.float32).double()
    expected = x.double() @ weight.T + bias.double()
    own = expected.abs().max() * (4e-6 if dtype == torch.float32 else 1e-2)
    for is_invariant in (False, True):
        product = TritonQuantizedWeight(packed, batch_invariant=is_invariant)
        actual = product.multiply(x, bias)
        assert (actual - expected).abs().max() < own, (code, rows, block, is_invariant)
        if rows == 17:  # counters of splits are zeros again
            assert torch.equal(product.multiply(x, bias), actual)


def attention_case(device: str, dtype: torch.dtype) -> None:
    """Checks decodes and extends with and without split keys, in pages of any size; head sizes that
    are not powers of two, values narrower than keys; windows that start within a page, chunks, soft
    caps and sinks, alone and together."""
    lens, query_lens = [1, 37, 300], [1, 20, 6]
    few = (
        (6, 2, 40, 1, 0, False, 0.0, False),
        (20, 1, 32, 128, 37, False, 0.7, True),
        (3, 1, 32, 16, 33, True, 0.0, False),
    )
    more = (
        (20, 1, 64, 128, 37, False, 0.0, True),
        (2, 1, 32, 16, 270, False, 0.7, False),
        (2, 1, 32, 16, 0, False, 0.7, True),
        (2, 1, 512, 16, 0, False, 0.0, False),
        (4, 2, 32, 16, 296, True, 0.0, False),
    )
    for shape in few + more if is_thorough(device) else few:
        num_q_heads, num_kv_heads, head_dim, page_size, window, is_chunked, cap, has_sinks = shape
        case = make_paged(
            lens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            device=device,
            dtype=dtype,
            cap=cap,
            own_value_dim=20 if head_dim == 40 else 0,
        )
        if has_sinks:
            case.sinks = 2 * torch.randn(num_q_heads).to(device)
        q = _randn(sum(query_lens), num_q_heads, head_dim, device=device, dtype=dtype)
        # The torch path does not support caps in batch-invariant mode, so skip that.
        for run in (partial(case.decode, q[:3]), partial(case.extend, q, query_lens)):
            for invariant in (False, True):
                seen = {"window": window, "is_chunked": is_chunked}
                _compare(
                    partial(run, batch_invariant=invariant, **seen),
                    dtype,
                    reference=partial(run, **seen),
                )


def ragged_case(device: str, dtype: torch.dtype) -> None:
    """Checks extends whose numbers of queries are only known on the device; padding has none."""
    lens, query_lens = [37, 1, 300, 64, 0, 0], [20, 1, 33, 64, 0, 0]
    for window in (0, 37) if is_thorough(device) else (37,):
        case = make_paged(lens, num_kv_heads=2, head_dim=32, device=device, dtype=dtype)
        q = _randn(sum(query_lens), 6, 32, device=device, dtype=dtype)
        ragged = AttentionMetadata(
            page_table=case.page_table,
            seq_lens=case.seq_lens,
            seq_lens_host=[max(lens)] * len(lens),
            query_start=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
            num_queries=sum(query_lens),
            page_size=case.page_size,
            window=window,
        )
        known = replace(case, page_table=case.page_table[:4], lens=lens[:4])
        _compare(
            partial(case.attend, q, TritonAttention(), ragged),
            dtype,
            reference=partial(known.extend, q, query_lens[:4], window=window),
        )


def empty_row_case(device: str, dtype: torch.dtype) -> None:
    """Checks that the result for a row without tokens (padding) is finite."""
    case = make_paged([0, 5], num_kv_heads=1, head_dim=32, device=device, dtype=dtype)
    with registry.using("triton"):
        for invariant in (False, True):
            out = case.decode(
                _randn(2, 2, 32, device=device, dtype=dtype), batch_invariant=invariant
            )
            assert out.isfinite().all()


def latent_case(device: str, dtype: torch.dtype) -> None:
    """Checks blocks of (query, head) pairs that start within a query's heads, and rows of several
    splits."""
    lens, query_lens = [1, 300, 90], [1, 3, 40]
    shapes = ((5, 44, 36), (16, 48, 32))
    for heads, head_dim, value_dim in shapes if is_thorough(device) else shapes[:1]:
        case = make_paged(
            lens, num_kv_heads=1, head_dim=head_dim, value_dim=value_dim, device=device, dtype=dtype
        )
        q = _randn(sum(query_lens), heads, head_dim, device=device, dtype=dtype)
        _compare(partial(case.decode, q[:3]), dtype)
        _compare(partial(case.extend, q, query_lens), dtype)


def latent_steps_case(device: str, dtype: torch.dtype) -> None:
    """Checks consecutive steps of one backend: each must leave the counters as the next one
    expects."""
    lens = [1, 300, 90, 700 if is_thorough(device) else 260, 129]
    case = make_paged(lens, num_kv_heads=1, head_dim=48, value_dim=32, device=device, dtype=dtype)
    q = _randn(len(lens), 16, 48, device=device, dtype=dtype)
    with registry.using("triton"):
        backend = case.backend()
        assert isinstance(backend, TritonAttention)
        whole = case.attend(q, backend, case.decodes())
        for rows in (slice(1, 4), slice(3, 5), slice(0, 5)):
            part = replace(case, lens=lens[rows], page_table=case.page_table[rows])
            found = part.attend(q[rows], backend, part.decodes())
            torch.testing.assert_close(found, whole[rows], rtol=2e-2, atol=2e-2)
    arrived = backend._arrived
    assert arrived is not None
    assert not arrived.any()
    torch.testing.assert_close(whole.double(), naive_decode(case, q), rtol=2e-2, atol=2e-2)


def block_extend_case(device: str, dtype: torch.dtype) -> None:
    """Checks blocks smaller than a tile of queries, as large and larger; chunks that start in a
    block."""
    tile = extend_blocks(32, dtype, 2, 999).rows // 2
    for block_size, num_kv_heads, lens, query_lens in (
        (4, 2, [8, tile + 28], [8, tile + 4]),  # the second row ends in a second tile
        (8, 1, [8, 2 * tile + 24, 3 * tile + 24], [8, tile + 16, 8]),
        (tile, 1, [3 * tile], [2 * tile]),
        (2 * tile, 1, [4 * tile], [2 * tile]),
    ):
        case = make_paged(lens, num_kv_heads=num_kv_heads, head_dim=32, device=device, dtype=dtype)
        q = _randn(sum(query_lens), 2 * num_kv_heads, 32, device=device, dtype=dtype)
        run = partial(case.extend, q, query_lens, block_size=block_size)
        for invariant in (False, True):
            _compare(
                partial(run, batch_invariant=invariant),
                dtype,
                reference=partial(run, batch_invariant=False),
            )


def bidirectional_case(device: str, dtype: torch.dtype) -> None:
    """Checks rows of several tiles of queries, with keys in several splits, and windows."""
    tile = extend_blocks(32, dtype, 2, 999).rows // 2
    lens, query_lens = [9, 3 * tile + 21], [9, 2 * tile + 5]
    case = make_paged(lens, num_kv_heads=2, head_dim=32, device=device, dtype=dtype)
    q = _randn(sum(query_lens), 4, 32, device=device, dtype=dtype)
    for window in (0, 2 * tile + 11):
        run = partial(case.extend, q, query_lens, window=window, is_bidirectional=True)
        for invariant in (False, True):
            _compare(
                partial(run, batch_invariant=invariant),
                dtype,
                reference=partial(run, batch_invariant=False),
            )


def choose_experts_case(device: str, dtype: torch.dtype) -> None:
    """Checks groups that are not powers of two, blocks, biases, factors, slices of wider rows."""
    bias = torch.randn(60).to(device)
    for routing, own in (
        (Routing(top_k=4), None),
        (Routing(top_k=1, normalize=True), None),
        (Routing(top_k=6, scoring="sigmoid", normalize=True, scale=2.5), bias),
        (Routing(top_k=3, scoring="softmax of chosen", scale=0.5), None),
        (Routing(top_k=3, scoring="sigmoid of chosen", scale=1.5, num_always=1), None),
        (Routing(top_k=2, normalize=True, scale=2.0, num_always=2), None),
        (Routing(top_k=5, num_groups=6, top_k_groups=2, num_summed=1), None),
        (Routing(top_k=5, scoring="sigmoid", num_groups=4, top_k_groups=3), bias),
        (Routing(top_k=3, scoring="sigmoid", block_size=2, block_capacity=5), bias),
    ):
        scores = torch.randn(8, 70).to(device)[:, :60]
        gate = torch.randn(8, 3).to(device)[:, 2:] if routing.num_always == 2 else None
        factors = torch.rand(60).to(device) if routing.num_always else None
        with registry.using("torch"):
            expected = choose_experts(scores, own, routing, gate, factors)
        with registry.using("triton"):
            actual = choose_experts(scores, own, routing, gate, factors)
            part = None if gate is None else gate[2:4]
            alone = choose_experts(scores[2:4], own, routing, part, factors)
            assert torch.equal(alone.expert_ids, actual.expert_ids[2:4])
            assert torch.equal(alone.weights, actual.weights[2:4])
            broken = choose_experts(torch.full_like(scores, float("nan")), own, routing)
        assert torch.equal(actual.expert_ids, expected.expert_ids), routing
        torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-5, atol=1e-6)
        chosen = broken.expert_ids[:, : routing.top_k]
        assert bool(((chosen >= 0) & (chosen < 60)).all())


def align_case(device: str, dtype: torch.dtype) -> None:
    """Checks that every pair of a local expert occurs once, in a tile of its expert; with more
    pairs than a block."""
    from kernels.fused_moe.triton_align import align_pairs

    for num_tokens, num_choices, first, count, rows in (
        (1, 2, 0, 9, 16),
        (5, 3, 3, 4, 16),
        (700, 2, 0, 3, 64),
        (3, 1, 8, 1, 16),
    ):
        ids = torch.randint(0, 9, (num_tokens, num_choices))
        tiles = align_pairs(ids.to(device), first, count, rows)
        owners = tiles.experts.cpu()
        used = int((owners >= 0).sum())
        assert bool((owners[:used] >= 0).all()), "tiles that are left over come last"
        pairs = tiles.pairs.cpu().view(-1, rows)[:used]
        is_pair = pairs < ids.numel()
        assert bool(is_pair[:, 0].all()), "no tile is empty"
        found = torch.stack((owners[:used, None].expand(-1, rows)[is_pair], pairs[is_pair]), dim=1)
        flat = ids.flatten() - first
        here = ((flat >= 0) & (flat < count)).nonzero().flatten()
        expected = sorted(zip(flat[here].tolist(), here.tolist(), strict=True))
        assert [tuple(row) for row in found.tolist()] == expected


def fused_moe_case(device: str, dtype: torch.dtype) -> None:
    """Checks more and fewer experts than tokens, and an unused expert; that single rows are bitwise
    equal; that quantized weights equal dequantized ones; that two shares of experts add up; zero
    experts and extra terms."""
    codes: tuple[WeightCode, ...] = ("uint4", "e4m3")
    for (num_tokens, num_experts, num_choices), code in zip(
        ((3, 9, 2), (40, 4, 3)), codes, strict=True
    ):
        x = _randn(num_tokens, 72, device=device, dtype=dtype)
        sizes: dict[str, Any] = {"hidden": 72, "inner": 48, "device": device, "dtype": dtype}
        ids = [torch.randperm(num_experts - 1)[:num_choices] for _ in range(num_tokens)]
        expert_ids = torch.stack(ids).to(device)
        weights = torch.rand(num_tokens, num_choices, device=device)

        def run(
            experts: Experts,
            rows: slice = slice(None),
            x: torch.Tensor = x,
            expert_ids: torch.Tensor = expert_ids,
            weights: torch.Tensor = weights,
        ) -> torch.Tensor:
            choice = ExpertChoice(expert_ids[rows], weights[rows])
            return fused_moe(x[rows], experts, choice, batch_invariant=True)

        plain = make_experts(num_experts, **sizes)
        quantized, dequantized = make_quantized_experts(num_experts, code=code, **sizes)
        _compare(partial(run, plain), dtype)
        own: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {
            "biases": ExpertBiases(_randn(num_experts, 96, **own), _randn(num_experts, 72, **own)),
            "activation": Activation("clamped", 1.702, 0.5),
        }
        choice = ExpertChoice(expert_ids, weights)
        _compare(partial(fused_moe, x, plain, choice, **options), dtype)
        upper = Experts(*(ExpertWeights(one.values[2:]) for one in plain))
        _compare(partial(fused_moe, x, upper, choice, first_expert=2), dtype)
        _compare(partial(fused_moe, x, plain, choice, weighs_inputs=True, activation=GELU), dtype)
        plain_up = Experts(ExpertWeights(plain.gate_up.values[:, :48]), plain.down)
        _compare(partial(fused_moe, x, plain_up, choice, activation=SQUARED_RELU), dtype)
        shared = _randn(num_tokens, 72, **own)
        gate = torch.randn(num_tokens, 3, device=device)[:, 2:]
        for extra in (
            ExtraTerms(shared),
            ExtraTerms(shared, gate),
            ExtraTerms(shared, first_zero_expert=1),
        ):
            few = Experts(*(ExpertWeights(one.values[:1]) for one in plain))
            _compare(partial(fused_moe, x, few, choice, extra=extra), dtype)
        options["biases"] = ExpertBiases(*(bias[2:] for bias in options["biases"]))
        _compare(partial(fused_moe, x, upper, choice, first_expert=2, **options), dtype)
        with registry.using("triton"):
            assert torch.equal(run(plain, slice(1, 2)), run(plain)[1:2])
            packed = Experts(*(pack_quantized_experts(part, dtype) for part in quantized))
            # Matmuls with quantized weights sum in a different order.
            close = 2e-2 if dtype.itemsize == 2 else 1e-5
            torch.testing.assert_close(run(packed), run(dequantized), rtol=close, atol=close)
            assert torch.equal(run(packed, slice(1, 2)), run(packed)[1:2])


def quantized_experts_case(device: str, dtype: torch.dtype) -> None:
    """Checks that experts of all codes except those of `fused_moe_case` equal dequantized ones."""
    x = _randn(5, 72, device=device, dtype=dtype)
    choice = ExpertChoice(
        torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0]], device=device),
        torch.rand(5, 2, device=device),
    )
    codes: tuple[WeightCode, ...] = ("e2m1", "uint4b8", "int8", "uint8", "uint8b128")
    close = 2e-2 if dtype.itemsize == 2 else 1e-5
    for code in codes if is_thorough(device) else codes[:3]:
        quantized, dequantized = make_quantized_experts(
            3, hidden=72, inner=48, code=code, device=device, dtype=dtype
        )
        with registry.using("torch"):
            expected = fused_moe(x, dequantized, choice)
        with registry.using("triton"):
            packed = Experts(*(pack_quantized_experts(part, dtype) for part in quantized))
            actual = fused_moe(x, packed, choice)
        torch.testing.assert_close(actual, expected, rtol=close, atol=close, msg=code)


def draft_ngrams_case(device: str, dtype: torch.dtype) -> None:
    """Checks rows with many, few and no repetitions, and short rows."""
    pool = torch.stack(
        [
            torch.arange(1500) % 7,
            torch.randint(0, 3, (1500,)),
            torch.arange(1500),
            torch.randint(0, 40, (1500,)),
        ]
    ).to(device, torch.int32)
    slots = torch.tensor([3, 0, 2, 1, 0, 1], device=device)
    newest = torch.tensor([1400, 1210, 600, 1499, 0, 2], device=device)
    for count, shortest, longest in ((5, 2, 12), (8, 1, 3), (1, 4, 4)):
        lookup = NgramLookup(
            slots=slots,
            newest=newest,
            count=count,
            shortest=shortest,
            longest=longest,
            num_tokens=1500,
        )
        _compare(partial(draft_ngrams, pool, lookup), torch.float32, 0.0)
    lookup = replace(lookup, count=4, shortest=2, longest=12)
    drafts, lengths = draft_ngrams(pool, lookup)
    assert drafts[1].tolist() == [(1210 + ahead) % 7 for ahead in range(1, 5)]
    assert drafts[2].tolist() == [600] * 4, "what never occurred is repeated"
    assert lengths[1:3].tolist() == [12, 0]


def invariance_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a query's result is bitwise equal in an extend, in chunks, and in a decode among
    other rows."""
    length = 290
    case = make_paged([length], num_kv_heads=2, head_dim=32, device=device, dtype=dtype)
    q = _randn(length, 4, 32, device=device, dtype=dtype)
    picked = [0, 255, 256, 280, 289]
    with registry.using("triton"):
        tail = case.extend(q[278:290], [12], batch_invariant=True)
        chunk = Paged([284], case.k_cache, case.v_cache, case.page_table, case.scale)
        part = chunk.extend(q[276:284], [8], batch_invariant=True)
        assert torch.equal(part[2:], tail[:6])
        rows = case.page_table.repeat(len(picked), 1)
        lens = [index + 1 for index in picked]
        steps = Paged(lens, case.k_cache, case.v_cache, rows, case.scale)
        decoded = steps.decode(q[picked], batch_invariant=True)
        assert torch.equal(decoded[3:], tail[[2, 11]])


def row_invariance_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a row's result is bitwise independent of other rows and of its position."""
    x = _randn(19, 2 * 128, device=device, dtype=dtype)
    weight = _randn(2 * 128, device=device, dtype=dtype)
    heads = x.unflatten(1, (4, 64))
    positions, seeds = torch.arange(19, device=device), torch.arange(19, device=device) + 2**33
    table = torch.randn(19, 64, device=device)

    def prepared(rows: slice) -> torch.Tensor:
        q, k = heads[rows, :3].clone(), heads[rows, 3:].clone()
        cache = torch.zeros(2, 16, 1, 64, device=device, dtype=dtype)
        q = qk_norm_rope_store(
            *(q, k, k, (cache, torch.zeros_like(cache)), positions[rows]),
            positions=positions[rows],
            cos_sin_cache=table,
            norms=HeadNorms(weight[:64], weight[64:128], 1e-6),
        )
        return torch.cat((q, cache.view(-1, 1, 64)[positions[rows]]), dim=1)

    numbers = torch.tensor([0.8, 1.3, 0.5, -1e-6]).to(device)
    ops: list[Callable[[slice], torch.Tensor]] = [
        lambda rows: rms_norm(x[rows], weight, 1e-6),
        lambda rows: fused_add_norm(x[rows], x[rows].flip(1), (Norm(weight),), 1e-6)[0][0],
        lambda rows: silu_and_mul(x[rows]),
        lambda rows: gelu_and_mul(x[rows]),
        lambda rows: clamped_swiglu(x[rows], 1.702, 0.5),
        lambda rows: clamped_silu_and_mul(x[rows], 0.5),
        lambda rows: xielu(x[rows], numbers),
        lambda rows: gumbel_noise(seeds[rows], positions[rows], 1500),
        prepared,
    ]
    with registry.using("triton"):
        for op in ops:
            whole = op(slice(None))
            for rows in (slice(0, 1), slice(3, 19), slice(18, 19), slice(5, 8)):
                assert torch.equal(op(rows), whole[rows])


def invariant_pieces_case(device: str, dtype: torch.dtype) -> None:
    """Checks that batch-invariant decodes do not change if a low limit forces queries to be
    computed in several chunks."""
    lens = [300, 17, 260, 1, 90]
    case = make_paged(lens, num_kv_heads=1, head_dim=32, device=device, dtype=dtype)
    q = _randn(5, 2, 32, device=device, dtype=dtype)
    with registry.using("triton"), pytest.MonkeyPatch.context() as patch:
        whole = case.decode(q, batch_invariant=True)
        backend = importlib.import_module("kernels.attention.triton_backend")  # loads Triton
        patch.setattr(backend, "MAX_INVARIANT_PARTIALS", 4)  # two queries of two splits
        assert torch.equal(case.decode(q, batch_invariant=True), whole)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    expected = naive_decode(case, q)
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance)


CASES: list[Case] = [
    rms_norm_case,
    rms_norm_pair_case,
    fused_add_norm_case,
    silu_and_mul_case,
    gelu_and_mul_case,
    clamped_swiglu_case,
    soft_cap_case,
    squared_relu_case,
    xielu_case,
    qk_norm_rope_store_case,
    prepare_latents_case,
    gumbel_case,
    linear_case,
    skinny_linear_case,
    quantized_linear_case,
    attention_case,
    ragged_case,
    empty_row_case,
    *SCHEDULE_CASES,
    *DELTA_CASES,
    *KIMI_CASES,
    *SCAN_CASES,
    *SPARSE_CASES,
    *BLOCK_CASES,
    latent_case,
    latent_steps_case,
    *MLA_CASES,
    *FP8_CASES,
    *LORA_CASES,
    block_extend_case,
    bidirectional_case,
    choose_experts_case,
    align_case,
    fused_moe_case,
    quantized_experts_case,
    invariance_case,
    row_invariance_case,
    invariant_pieces_case,
    draft_ngrams_case,
    *SAMPLING_CASES,
]
