"""Kernels compile for several GPU generations, with the launches of serving.

Triton's cache keeps the binaries for later runs; its keys are hashes of all sources, options and
versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import (
    SILU,
    LatentRows,
    Norm,
    activate_fp8,
    fused_add_norm_fp8,
    prepare_latents,
    qk_norm_rope_store,
    registry,
)
from tests.support.effort import IS_LONG
from tests.support.kernels.paged_cases import make_paged

pytest.importorskip("triton", reason="Triton is for Linux")

from triton.runtime.jit import JITFunction

from kernels.attention import triton_kernel
from kernels.attention.triton_config import MAX_HEAD_DIM
from kernels.linear.triton_kernel import matmul_fixed_tiles
from kernels.quantize_fp8 import quantize_fp8
from tests.support.kernels.aot import Binary, compiling_for
from tests.support.kernels.experts import make_experts
from tests.support.kernels.launches import (
    MIXED_TOKENS,
    adapters,
    attention,
    block_sparse_attention,
    draw,
    kimi_delta,
    linear_attention,
    mamba,
    mix,
    prepare,
    quantized_products,
    sparse_attention,
    token_ops,
)

SHARED_LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Maximum shared memory of one program, by compute capability (CUDA C++ guide, table 30)."""

HEAD_DIM = 256 if IS_LONG else 64
"""Dimensions of heads with windows and caps; 64 take half of the time."""


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(older, marks=pytest.mark.long) for older in (80, 89))]
)
@pytest.mark.randomized  # with more launches
def test_every_kernel_compiles(capability: int) -> None:
    is_whole = IS_LONG or capability != 90
    with compiling_for(capability) as compiled, registry.using("triton"):
        token_ops(torch.bfloat16, is_brief=not is_whole)
        if is_whole:
            # Extras of products do not depend on their codes.
            quantized_products(torch.bfloat16, (2,))
            attention(128, torch.bfloat16)
            attention(64 if capability == 90 else 256, torch.float32)
        else:
            # Products with other codes are compiled by tests/cuda/test_binaries.py.
            quantized_products(torch.bfloat16, (2,), codes=("e4m3",), with_extras=False)
            # Like a test below, which reuses the binaries.
            attention(HEAD_DIM, torch.bfloat16, window=100, cap=50.0)
        # These use little shared memory, which is where this generation differs from the others.
        if capability != 89:
            draw(2, torch.Tensor.clone)
            prepare(2, torch.Tensor.clone)
    assert len({binary.kernel for binary in compiled}) == (18 if capability == 89 else 33)
    assert all(binary.shared_bytes <= SHARED_LIMITS[capability] for binary in compiled), compiled


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.long)])
def test_kernels_of_mamba_compile(capability: int, dtype: torch.dtype) -> None:
    with compiling_for(capability) as compiled, registry.using("triton"):
        mamba(dtype)
    assert len({binary.kernel for binary in compiled}) == 3
    assert all(binary.shared_bytes <= SHARED_LIMITS[capability] for binary in compiled), compiled


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(older, marks=pytest.mark.long) for older in (80, 89))]
)
def test_linear_attention_with_wide_values_compiles(capability: int) -> None:
    """Heads of OLMo Hybrid, whose values are twice as wide as its keys."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        linear_attention(torch.bfloat16, key=96, value=192)
    assert len({binary.kernel for binary in compiled}) == 5
    assert all(binary.shared_bytes <= SHARED_LIMITS[capability] for binary in compiled), compiled


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.long) for other in (80, 89, 100))]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_kimi_delta_attention_compiles(capability: int, dtype: torch.dtype) -> None:
    """Decodes and pieces of Kimi Linear's size."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        kimi_delta(dtype)
    assert len({binary.kernel for binary in compiled}) == 6
    limit = SHARED_LIMITS.get(capability, 227 << 10)
    assert all(binary.shared_bytes <= limit for binary in compiled), compiled
    if dtype == torch.bfloat16:  # released models' type
        assert all(binary.usage().spilled_bytes == 0 for binary in compiled)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.long) for other in (80, 89, 100))]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
@pytest.mark.randomized  # with more ranks
def test_products_with_adapters_compile(capability: int, dtype: torch.dtype) -> None:
    with compiling_for(capability) as compiled, registry.using("triton"):
        adapters(dtype, (16,) if not IS_LONG else (16, 32, 64, 192))
    assert len({binary.kernel for binary in compiled}) == 2
    limit = SHARED_LIMITS.get(capability, 227 << 10)
    assert all(binary.shared_bytes <= limit for binary in compiled), compiled
    assert all(binary.usage().spilled_bytes == 0 for binary in compiled)


def test_a_hidden_score_s_product_is_exact() -> None:
    """Without fusing: a rounded maximum would differ from the product fused with a difference, and
    yield NaN for a query that attends to nothing in a split. The interpreter never fuses."""
    assert math.frexp(triton_kernel._HIDDEN.value)[0] == -0.5


@pytest.mark.parametrize(
    "is_chunked", [False, pytest.param(True, marks=pytest.mark.long)], ids=["window", "chunks"]
)
@pytest.mark.randomized  # with wider heads
def test_capped_attention_within_a_window_compiles(is_chunked: bool) -> None:
    with compiling_for(90) as compiled, registry.using("triton"):
        attention(HEAD_DIM, torch.bfloat16, window=100, cap=50.0, is_chunked=is_chunked)
    assert len({binary.kernel for binary in compiled}) == 2
    assert all(binary.shared_bytes <= SHARED_LIMITS[90] for binary in compiled), compiled


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_of_the_widest_heads_compiles(capability: int, dtype: torch.dtype) -> None:
    """Heads of Gemma 4's full-attention layers."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        attention(MAX_HEAD_DIM, dtype)
    own = [binary for binary in compiled if binary.kernel == "_attention_kernel"]
    assert len({binary.key for binary in own}) == 2
    assert all(binary.shared_bytes <= SHARED_LIMITS[capability] for binary in own), own
    assert all(binary.usage().spilled_bytes == 0 for binary in own)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(older, marks=pytest.mark.long) for older in (80, 89))]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_attention_to_latents_compiles(capability: int, dtype: torch.dtype) -> None:
    """With DeepSeek's sizes: one binary for preparations, one for decodes, one for extends of any
    number of queries."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        for number in (1, 3):
            lens = [number * 160 + row for row in range(number)]
            case = make_paged(lens, num_kv_heads=1, head_dim=576, value_dim=512, dtype=dtype)
            q = torch.randn(2 * number, 16, 576).to(dtype)
            case.decode(q[:number])
            case.extend(q, [2] * number)
            new = torch.randn(number, 576).to(dtype)
            rows = LatentRows(new[:, :512], new[:, 512:], torch.ones(512), 1e-6)
            prepare_latents(
                *(torch.randn(number, 16, 192).to(dtype), q[:number], rows, case.k_cache),
                torch.arange(number),
                positions=torch.arange(number),
                cos_sin_cache=torch.randn(9, 64),
            )
    assert len({(binary.kernel, binary.key) for binary in compiled}) == 3
    assert all(binary.shared_bytes <= SHARED_LIMITS[capability] for binary in compiled), compiled
    # Extends may use the maximum; decodes in bf16, many of which should run concurrently, half.
    usages = {binary.key: binary.usage() for binary in compiled}.values()
    assert sum(usage.spilled_bytes > 0 for usage in usages) <= 1
    assert sum(usage.registers > 168 for usage in usages) <= 1 + (dtype == torch.float32)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(older, marks=pytest.mark.long) for older in (80, 89))]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_sparse_attention_compiles(capability: int, dtype: torch.dtype) -> None:
    """With DeepSeek V3.2's sizes: one binary each for index keys, scores, and attention, for any
    number of queries."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        sparse_attention(dtype)
    assert len({(binary.kernel, binary.key) for binary in compiled}) == 3
    assert all(binary.shared_bytes <= SHARED_LIMITS[capability] for binary in compiled), compiled
    if dtype == torch.bfloat16:  # released models' type
        assert all(binary.usage().spilled_bytes == 0 for binary in compiled)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.long) for other in (80, 89, 100))]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str
)
def test_block_sparse_attention_compiles(capability: int, dtype: torch.dtype) -> None:
    """Of MiniMax-M3's size: one binary each for scores and attention, of any number of queries."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        block_sparse_attention(dtype)
    assert len({(binary.kernel, binary.key) for binary in compiled}) == 2
    limit = SHARED_LIMITS.get(capability, 227 << 10)
    assert all(binary.shared_bytes <= limit for binary in compiled), compiled
    if dtype == torch.bfloat16:  # released models' type
        assert all(binary.usage().spilled_bytes == 0 for binary in compiled)


FP8_MARKS = [90, *(pytest.param(other, marks=pytest.mark.long) for other in (89, 100))]


@pytest.mark.parametrize("capability", FP8_MARKS)
def test_kernels_of_fp8_caches_compile(capability: int) -> None:
    """Stores cast, and decodes convert what is fetched ahead, with the instructions for FP8."""
    dtype = torch.bfloat16
    with compiling_for(capability) as compiled, registry.using("triton"):
        case = make_paged([37], num_kv_heads=2, head_dim=64, dtype=dtype).in_fp8()
        case.decode(torch.randn(1, 8, 64).to(dtype))
        heads, index = torch.randn(1, 2, 64).to(dtype), torch.zeros(1, dtype=torch.long)
        table = torch.randn(9, 64)
        qk_norm_rope_store(
            *(heads, heads, heads, (case.k_cache, case.v_cache), index),
            positions=index,
            cos_sin_cache=table,
        )
        if IS_LONG:
            attention(128, dtype, is_fp8=True)
            latents(dtype)
    own = [one for one in compiled if one.kernel != "_schedule_kernel"]
    assert all(re.search(r"cvt\.rn\.\S*e4m3x2", one.ptx) for one in own)
    assert "cp.async.cg.shared.global" in own[0].ptx or "cp.async.ca.shared.global" in own[0].ptx
    assert all(one.usage().spilled_bytes == 0 for one in own), own
    assert all(one.shared_bytes <= SHARED_LIMITS.get(capability, 227 << 10) for one in own), own


def quantize(width: int, *, by_block: bool) -> None:
    """Of activations, of a norm of as many features, and of activations within their kernel."""
    x = torch.zeros(3, 2 * width, dtype=torch.bfloat16)
    quantize_fp8(x[:, :width], by_block=by_block)
    activate_fp8(x, SILU, by_block=by_block)
    if width <= 16384:
        fused_add_norm_fp8(
            *(x[:, :width], x[:, :width], Norm(x[0, :width]), 1e-6), by_block=by_block
        )


@pytest.mark.parametrize("capability", FP8_MARKS)
def test_activations_are_quantized_by_16_bytes(capability: int) -> None:
    """Swaps within four features stay in registers, and no row spills."""
    with compiling_for(capability) as compiled, registry.using("triton"):
        for width in (4096, 28672):
            for by_block in (False, True):
                quantize(width, by_block=by_block)
    assert len({one.key for one in compiled}) == 10
    for one in compiled:
        assert re.search(r"cvt\.rn\.\S*e4m3x2", one.ptx)
        assert set(re.findall(r"ld\.global[.\w]*", one.ptx)) == {"ld.global.v4.b32"}
        assert "st.global.v4.b32" in one.ptx
        # Maxima; a norm also passes its row from threads that load 16 bytes to those that store.
        assert one.shared_bytes <= (8192 if one.kernel == "_fused_add_norm_fp8_kernel" else 64)
        usage = one.usage()
        assert usage.spilled_bytes == 0
        assert usage.registers <= 96


def latents(dtype: torch.dtype) -> None:
    """Stores, decodes and extends of DeepSeek's latents in an FP8 cache."""
    case = make_paged([160], num_kv_heads=1, head_dim=576, value_dim=512, dtype=dtype).in_fp8()
    q, new = torch.randn(2, 16, 576).to(dtype), torch.randn(1, 576).to(dtype)
    case.decode(q[:1])
    case.extend(q, [2])
    prepare_latents(
        torch.randn(1, 16, 192).to(dtype),
        torch.empty(1, 16, 576).to(dtype),
        LatentRows(new[:, :512], new[:, 512:], torch.ones(512), 1e-6),
        *(case.k_cache, torch.arange(1)),
        positions=torch.arange(1),
        cos_sin_cache=torch.randn(9, 64),
    )


def test_tiles_have_as_many_rows_as_an_expert_has_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that an expert's weights are used for as many tokens as possible."""
    rows: list[int] = []

    def launch(self: Any, *_: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        rows.append(constants.get("BLOCK_M", 0))

    monkeypatch.setattr(JITFunction, "run", launch)
    experts = make_experts(4, hidden=128, inner=64, dtype=torch.bfloat16)
    with registry.using("triton"):
        mix(experts, MIXED_TOKENS, torch.bfloat16, with_extras=False)
    assert list(filter(None, rows)) == [16, 16, 64, 64, 128, 128]


def variants(launch: Callable[[int], None]) -> set[tuple[str, str]]:
    """The binaries that launches of several shapes and alignments need."""
    compiled: list[Binary]
    with compiling_for(90) as compiled, registry.using("triton"):
        for number in (1, 3, 16):
            launch(number)
    return {(binary.kernel, binary.key) for binary in compiled}


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind an aligned address."""
    return torch.cat((tensor[:1], tensor))[1:]


def test_no_step_needs_another_binary_than_the_first() -> None:
    dtype = torch.bfloat16
    weight = torch.randn(64, 64).to(dtype)

    def launch(number: int) -> None:
        place = shifted if number % 2 else torch.Tensor.clone
        heads = torch.randn(number, 2, 64).to(dtype)
        caches = torch.zeros(2, 2, 8, 2, 64, dtype=dtype)
        index = place(torch.zeros(number, dtype=torch.long))
        qk_norm_rope_store(
            *(heads, heads, heads, (caches[0], caches[1]), index),
            positions=index,
            cos_sin_cache=torch.randn(9, 64),
        )
        matmul_fixed_tiles(torch.randn(number, 64).to(dtype), weight)

    assert len(variants(launch)) == 2


def test_no_draw_and_no_preparation_needs_another_binary_than_the_first() -> None:
    def launch(number: int) -> None:
        place = shifted if number % 2 else torch.Tensor.clone
        draw(number, place)
        prepare(number, place)

    assert len(variants(launch)) == 15


def test_experts_need_no_other_binary_for_other_numbers_of_tokens() -> None:
    """Tiles, both products and the sum for one token, an odd number, and a multiple of 16."""
    experts = make_experts(4, hidden=128, inner=64, dtype=torch.bfloat16)

    def launch(number: int) -> None:
        mix(experts, (number,), torch.bfloat16, with_extras=False)

    assert len(variants(launch)) == 4


@pytest.mark.randomized  # with wider heads
@pytest.mark.parametrize(
    "invariant",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["plain", "batch-invariant"],
)
def test_attention_needs_one_binary_per_kernel(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(number: int) -> None:
        lens = [number * 16 + row for row in range(number)]
        # Same as above, so that binaries are reused.
        case = make_paged(lens, num_kv_heads=2, head_dim=HEAD_DIM, dtype=torch.bfloat16, cap=50.0)
        if number % 2:
            unaligned = shifted(torch.tensor(lens, dtype=torch.int32))
            monkeypatch.setattr(type(case), "seq_lens", property(lambda _: unaligned))
        q = torch.randn(2 * number, 8, HEAD_DIM).to(torch.bfloat16)
        case.decode(q[:number], window=100, batch_invariant=invariant)
        case.extend(q, [2] * number, window=100, batch_invariant=invariant)
        monkeypatch.undo()

    # Batch-invariant extends are scheduled like decodes, with rows of the page table by index.
    assert len(variants(launch)) == (3 if invariant else 4)
