"""Resources of every kernel on four GPU generations, compiled without a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from kernels import (
    Experts,
    ExpertWeights,
    linear,
    pack_quantized_experts,
    pack_quantized_linear_weight,
    registry,
    silu_and_mul,
)
from kernels.attention import triton_backend
from kernels.attention.triton_config import AttentionBlocks
from kernels.fused_moe import triton_kernel as fused_moe_kernel
from kernels.linear import WeightCode
from kernels.linear import triton_kernel as linear_kernel
from kernels.linear.packed_codes import TILE_DEPTH
from kernels.linear.triton_skinny import multiply_few
from kernels.linear.triton_split import count_arrivals
from tests.support.cuda.binaries import (
    CAPABILITIES,
    OTHER_REGISTERS,
    PRODUCTS,
    REGISTERS,
    SHARED_LIMITS,
    SPILLS,
    product,
)
from tests.support.effort import IS_LONG
from tests.support.kernels.aot import Binary, compiling_for
from tests.support.kernels.experts import make_codes, make_experts
from tests.support.kernels.launches import (
    MIXED_TOKENS,
    attention,
    draw,
    expanded_prompts,
    kimi_delta,
    linear_attention,
    mix,
    prepare,
    quantized_products,
    token_ops,
)
from tests.support.kernels.paged_cases import make_paged

DTYPE = torch.bfloat16


def exceeded(capability: int, launch: Callable[[], object]) -> list[str]:
    """Resources of a launch's binaries beyond their budgets."""
    compiled: list[Binary]
    with compiling_for(capability) as compiled, registry.using("triton"):
        launch()
    found = []
    for binary in {binary.key: binary for binary in compiled}.values():
        name, usage = binary.kernel, binary.usage()
        budgets = (
            ("registers", usage.registers, REGISTERS.get(name, OTHER_REGISTERS)),
            ("bytes spilled", usage.spilled_bytes, SPILLS.get((name, capability), 0)),
            ("bytes shared", binary.shared_bytes, SHARED_LIMITS[capability]),
        )
        found += [f"{name}: {value} {what}" for what, value, most in budgets if value > most]
        expected = product(name, binary.tile_rows, capability)
        if binary.instruction != expected:
            found.append(f"{name}: multiplies by {binary.instruction!r} instead of {expected!r}")
    return found


def everything() -> None:
    token_ops(DTYPE)
    quantized_products(DTYPE, MIXED_TOKENS, blocks=(128, 32, 0))
    attention(128, DTYPE)
    attention(256, DTYPE, window=100, cap=50.0)
    attention(512, DTYPE)
    attention(128, DTYPE, window=100, is_chunked=True)
    draw(2, torch.Tensor.clone)
    prepare(2, torch.Tensor.clone)


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_stay_within_their_budgets(capability: int) -> None:
    assert exceeded(capability, everything) == []


def prompt(head_dim: int, *, window: int = 0, is_fp8: bool = False) -> None:
    """A long prompt, with larger tiles than few tokens."""
    case = make_paged([300], num_kv_heads=2, head_dim=head_dim, dtype=DTYPE)
    case = case.in_fp8() if is_fp8 else case
    case.extend(torch.randn(300, 8, head_dim).to(DTYPE), [300], window=window)


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_long_prompts_stay_within_their_budgets(capability: int) -> None:
    def launch() -> None:
        prompt(64)
        prompt(128)

    assert exceeded(capability, launch) == []


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_so_do_those_of_models_with_windows(capability: int) -> None:
    assert exceeded(capability, lambda: prompt(128, window=100)) == []


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES[1:])
def test_so_do_those_of_fp8_caches(capability: int) -> None:
    def launch() -> None:
        attention(128, DTYPE, is_fp8=True)
        attention(256, DTYPE, window=100, is_fp8=True)
        prompt(128, is_fp8=True)

    assert exceeded(capability, launch) == []


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_linear_attention_stays_within_its_budgets(capability: int) -> None:
    """With Qwen3.5's dimensions."""
    assert exceeded(capability, lambda: linear_attention(DTYPE)) == []


def test_states_are_advanced_within_their_budget() -> None:
    """A decode step, whose kernels take a second."""
    assert exceeded(90, lambda: linear_attention(DTYPE, lengths=(1,))) == []


@pytest.mark.long
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_so_does_kimi_delta_attention(capability: int) -> None:
    """Of Kimi Linear's dimensions."""
    assert exceeded(capability, lambda: kimi_delta(DTYPE)) == []


_FETCH = re.compile(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)")
"""Asynchronous copies, by bytes per thread."""


def fetched_ahead(kernel: str, capability: int, launch: Callable[[], object]) -> list[set[int]]:
    """Asynchronous copies in each of a kernel's binaries."""
    compiled: list[Binary]
    with compiling_for(capability) as compiled, registry.using("triton"):
        launch()
    own = {one.key: one for one in compiled if one.kernel == kernel}.values()
    return [{int(size, 0) for size in _FETCH.findall(one.ptx)} for one in own]


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "launch"),
    [
        (80, lambda: attention(128, DTYPE)),
        (80, lambda: prompt(128)),
        (90, lambda: prompt(128)),
    ],
    ids=["short", "long", "long on Hopper"],
)
def test_keys_are_fetched_ahead_and_their_pages_before_them(
    capability: int, launch: Callable[[], object]
) -> None:
    """Keys are fetched by 16 bytes, and page numbers by 4, which requires three stages. Hopper's
    decodes and short extends were faster with two."""
    sizes = fetched_ahead("_attention_kernel", capability, launch)
    assert sizes
    assert all(one == {4, 16} for one in sizes), sizes


@pytest.mark.parametrize(
    "capability",
    [one if one == 90 else pytest.param(one, marks=pytest.mark.long) for one in CAPABILITIES],
)
def test_expanded_prompts_stay_within_their_budgets(capability: int) -> None:
    """Of DeepSeek's size: one binary for prompts of one and of several pieces of keys, all of which
    are fetched ahead."""

    def launch() -> None:
        expanded_prompts(DTYPE)

    assert fetched_ahead("_expanded_kernel", capability, launch) == [{16}]
    assert exceeded(capability, launch) == []


MIXED = MIXED_TOKENS if IS_LONG else MIXED_TOKENS[1:2]
"""Numbers of tokens of experts: one for each tile size; only the second in `make test`."""
ROWS = (1, 17, 33) if IS_LONG else (17,)
"""The same for other products."""


def test_weights_of_experts_are_fetched_ahead() -> None:
    experts = make_experts(4, hidden=128, inner=64, dtype=DTYPE)
    sizes = fetched_ahead(
        "_multiply_kernel", 90, lambda: mix(experts, MIXED, DTYPE, with_extras=False)
    )
    assert sizes == 2 * len(MIXED) * [{16}]


@pytest.mark.parametrize(
    "capability",
    [one if one == 90 else pytest.param(one, marks=pytest.mark.long) for one in CAPABILITIES],
)
def test_weights_of_few_rows_are_fetched_ahead(capability: int) -> None:
    """A binary for each tile size, with and without bias, within the budgets."""
    numbers = (1, 17, 33, 65) if IS_LONG else (17,)

    def launch() -> None:
        weight = torch.zeros(128, 1024, dtype=DTYPE)
        arrived = count_arrivals(weight.device)
        for number in numbers:
            x = torch.zeros(number, 1024, dtype=DTYPE)
            for bias in (None, x[0, :128])[: 2 if IS_LONG else 1]:
                multiply_few(x, weight, bias, arrived)

    sizes = fetched_ahead("_skinny_matmul_kernel", capability, launch)
    assert sizes == len(numbers) * (2 if IS_LONG else 1) * [{16}]
    assert exceeded(capability, launch) == []


FORMATS: dict[str, tuple[WeightCode, int]] = {
    "int4": ("uint4b8", 128),
    "awq": ("uint4", 128),
    "int4-32": ("uint4b8", 32),
    "nvfp4": ("e2m1", 16),
    "mxfp4": ("e2m1", 32),
    "fp8-blocks": ("e4m3", 128),
    "fp8-channel": ("e4m3", 256),
    "int8": ("int8", 256),
    "int8-zeros": ("uint8", 64),
}
"""Codes of each format, and number of features (of 256) that share a scale."""


def multiply_quantized(name: str) -> None:
    """Products with tiles of each of these sizes."""
    code, block = FORMATS[name]
    codes, scaling = make_codes(64, 256, code=code, block=block, offset=0)
    weight = pack_quantized_linear_weight(codes, scaling, dtype=DTYPE)
    for rows in ROWS:
        linear(torch.zeros(rows, 256, dtype=DTYPE), weight)


def mix_quantized(name: str, numbers: tuple[int, ...] = MIXED) -> None:
    """Experts whose products have tiles of each size for these numbers of tokens."""
    code, block = FORMATS[name]
    parts = []
    for rows, columns in ((512, 256), (256, 256)):
        codes, scaling = make_codes(4, rows, columns, code=code, block=block, offset=0)
        parts.append(pack_quantized_experts(ExpertWeights(codes, scaling), DTYPE))
    mix(Experts(*parts), numbers, DTYPE, with_extras=False)


QUANTIZED: dict[str, tuple[Callable[[str], None], int]] = {
    "_packed_matmul_kernel": (multiply_quantized, len(ROWS)),
    "_packed_multiply_kernel": (mix_quantized, 2 * len(MIXED)),
}
"""Launches of products with quantized weights, by kernel, and the number of binaries."""
FP8_FORMATS = ("fp8-blocks", "fp8-channel")
"""Formats whose experts have FP8 inputs if tiles have 64 or more rows."""


def exceeded_by_codes(kernel: str, name: str, capability: int) -> list[str]:
    """Spills beyond the budget, and single-byte loads of codes, which are not fetched ahead."""
    compiled: list[Binary]
    launch, number = QUANTIZED[kernel]
    with compiling_for(capability) as compiled, registry.using("triton"):
        launch(name)
    if kernel == "_packed_multiply_kernel" and name in FP8_FORMATS and capability >= 89:
        number = 2
    if kernel == "_packed_matmul_kernel" and name == "fp8-blocks" and capability == 100:
        number = min(number, 2)  # of 32 and 64 rows
    own = {one.key: one for one in compiled if one.kernel == kernel}.values()
    found = [] if len(own) == number else [f"{len(own)} binaries"]
    # Scales of groups within a tile are fetched ahead, too, but are fewer bytes.
    least = 4 if FORMATS[name][1] < TILE_DEPTH else 16
    for one in own:
        sizes = {int(size, 0) for size in _FETCH.findall(one.ptx)}
        if 16 not in sizes or min(sizes) < least:
            found.append(f"tiles of {one.tile_rows} rows are fetched by {sizes} bytes")
        if re.search(r"ld\.global[.\w]*\.[bsu]8\b", one.ptx):
            found.append(f"tiles of {one.tile_rows} rows load single bytes")
        if one.usage().spilled_bytes > SPILLS.get((kernel, capability), 0):
            found.append(f"tiles of {one.tile_rows} rows spill {one.usage().spilled_bytes} bytes")
    return found


SHORT = {("_packed_matmul_kernel", "awq", 90), ("_packed_multiply_kernel", "mxfp4", 90)}


@pytest.mark.parametrize(
    ("kernel", "name", "capability"),
    [
        case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
        for case in itertools.product(QUANTIZED, FORMATS, CAPABILITIES)
    ],
)
def test_codes_are_fetched_ahead_by_16_bytes(kernel: str, name: str, capability: int) -> None:
    assert exceeded_by_codes(kernel, name, capability) == []


@pytest.mark.parametrize(
    ("name", "capability", "rows"),
    [
        pytest.param(*case, marks=() if case == ("fp8-blocks", 90, 128) else pytest.mark.long)
        for case in itertools.product(FP8_FORMATS, CAPABILITIES[1:], (64, 128))
    ],
)
def test_experts_with_fp8_inputs_stay_within_their_budgets(
    name: str, capability: int, rows: int
) -> None:
    """Products of FP8 with all codes fetched ahead."""
    compiled: list[Binary]
    with compiling_for(capability) as compiled, registry.using("triton"):
        mix_quantized(name, MIXED_TOKENS[1:2] if rows == 64 else MIXED_TOKENS[2:])
    own = {one.key: one for one in compiled if one.kernel == "_fp8_multiply_kernel"}.values()
    assert [one.tile_rows for one in own] == 2 * [rows]
    for one in own:
        expected = PRODUCTS[capability]
        assert re.search(rf"{expected}\S*(e4m3\S*e4m3|f8f6f4)", one.ptx)
        assert 16 in {int(size, 0) for size in _FETCH.findall(one.ptx)}
        assert set(re.findall(r"ld\.global[.\w]*", one.ptx)) <= {"ld.global.b32"}, "of scales"
        assert one.usage().spilled_bytes <= SPILLS.get((one.kernel, capability), 0)
        assert one.shared_bytes <= SHARED_LIMITS[capability]


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
def test_factors_of_the_next_piece_are_fetched_ahead(capability: int) -> None:
    sizes = fetched_ahead("_states_kernel", capability, lambda: linear_attention(DTYPE))
    assert sizes == [{4, 16}], "fades by 4 bytes, all others by 16"


def use_larger_tiles(patch: pytest.MonkeyPatch) -> None:
    tiles = linear_kernel._TILES[DTYPE]._replace(rows=128, columns=256, depth=128)
    patch.setitem(linear_kernel._TILES, DTYPE, tiles)


def use_more_queries(patch: pytest.MonkeyPatch) -> None:
    blocks = AttentionBlocks(128, 128, 4, 2, 256)
    patch.setattr(triton_backend, "extend_blocks", lambda *_: blocks)


def use_smaller_tiles(patch: pytest.MonkeyPatch) -> None:
    tiles = linear_kernel._TILES[DTYPE]._replace(rows=16)
    patch.setitem(linear_kernel._TILES, DTYPE, tiles)


def use_more_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_moe_kernel, "_SUM_BLOCK", 32768)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sabotage", "what"),
    [
        (use_larger_tiles, "_matmul_kernel: .* bytes shared"),
        (use_more_queries, "_attention_kernel: .* bytes spilled"),
        (use_smaller_tiles, "_matmul_kernel: multiplies by 'mma.sync'"),
        (use_more_columns, "_sum_kernel: .* registers"),
    ],
    ids=["shared", "spills", "instruction", "registers"],
)
def test_what_takes_more_is_found(
    sabotage: Callable[[pytest.MonkeyPatch], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)

    def launch() -> None:
        token_ops(DTYPE)
        attention(128, DTYPE)

    assert any(re.match(what, one) for one in exceeded(90, launch))


def test_a_kernel_without_products_is_within_its_budget() -> None:
    """Like the others, but compiled in a quarter of a second."""
    assert exceeded(90, lambda: silu_and_mul(torch.ones(2, 64))) == []
