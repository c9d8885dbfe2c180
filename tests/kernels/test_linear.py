from __future__ import annotations

import pytest
import torch

from kernels import PackedLinear, linear, pack_linear_weight
from kernels.linear import onednn
from kernels.linear.plain import PlainWeight
from kernels.linear.skinny import is_skinny
from kernels.linear.tiled import TiledWeight
from tests.support.effort import IS_LONG

SHAPES = [
    (1408, 256), (512, 256), (256, 256), (256, 704), (4096, 256), (3072, 768), (768, 3072),
    (2500, 256), (100, 250), (17, 33),
]  # fmt: skip


def _weight(out_features: int, in_features: int) -> torch.Tensor:
    return torch.randn(out_features, in_features) * in_features**-0.5


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape: tuple[int, int], batch_invariant: bool) -> None:
    weight, bias = _weight(*shape), torch.randn(shape[0])
    packed = pack_linear_weight(weight, batch_invariant=batch_invariant)
    assert (packed.out_features, packed.in_features) == shape
    for rows in (0, 1, 2, 7, 33):
        x = torch.randn(rows, shape[1])
        expected = x.double() @ weight.double().t()
        plain = linear(x, packed)
        torch.testing.assert_close(plain.double(), expected, rtol=1e-4, atol=1e-4)
        with_bias = linear(x, packed, bias)
        torch.testing.assert_close(with_bias.double(), expected + bias, rtol=1e-4, atol=1e-4)


def test_plain_tensor_and_strided_input() -> None:
    weight = _weight(40, 32)
    x = torch.randn(5, 100)[:, 10:42]
    expected = x @ weight.t()
    torch.testing.assert_close(linear(x, weight), expected)
    for batch_invariant in (False, True):
        packed = pack_linear_weight(weight, batch_invariant=batch_invariant)
        torch.testing.assert_close(linear(x, packed), expected)
        torch.testing.assert_close(linear(x[:1], packed), expected[:1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_matches_fp64_of_the_rounded_values(shape: tuple[int, int]) -> None:
    weight, bias = _weight(*shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    packed = pack_linear_weight(weight)
    for rows in (0, 1, 2, 33):
        x = torch.randn(rows, shape[1]).bfloat16()
        expected = x.double() @ weight.double().t() + bias.double()
        actual = linear(x, packed, bias)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)


def test_other_types_stay_plain() -> None:
    assert isinstance(pack_linear_weight(_weight(8, 8).half()), PlainWeight)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6144, 4096), True),
        ((4096, 4096), True),
        ((4096, 12288), True),
        ((24576, 4096), False),
        ((151936, 4096), False),
        ((4096, 512), False),
        ((4096, 4160), False),
        ((4000, 4096), False),
    ],
    ids=["qkv", "o", "down", "gate and up", "head", "short", "odd depth", "odd columns"],
)
def test_products_that_leave_multiprocessors_idle_are_split(
    shape: tuple[int, int], expected: bool
) -> None:
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert is_skinny(weight, num_processors=132) == expected
    assert not is_skinny(weight.float(), num_processors=132)
    assert not is_skinny(weight, num_processors=64), "the device is filled"


def test_falls_back_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_available", lambda dtype: False)
    assert isinstance(pack_linear_weight(_weight(8, 8)), PlainWeight)
    assert isinstance(pack_linear_weight(_weight(8, 8), batch_invariant=True), TiledWeight)


def _assert_rows_invariant(packed: PackedLinear, row_counts: list[int]) -> None:
    x = torch.randn(max(row_counts) + 50, packed.in_features)
    bias = torch.randn(packed.out_features)
    reference = torch.cat([linear(x[i : i + 16], packed, bias) for i in range(0, len(x), 16)])
    for rows in row_counts:
        start = int(torch.randint(0, len(x) - rows + 1, ()))
        result = linear(x[start : start + rows], packed, bias)
        assert torch.equal(result, reference[start : start + rows]), f"{rows} rows at {start}"


@pytest.mark.randomized  # with every number of rows for several threads, too
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (6144, 768)], ids=str)
def test_invariant_rows_are_bitwise_equal(shape: tuple[int, int], threads: int) -> None:
    torch.set_num_threads(threads)
    packed = pack_linear_weight(_weight(*shape), batch_invariant=True)
    # Several threads, which spin, take six times as long.
    small = shape[0] * shape[1] < 400_000 and (threads == 1 or IS_LONG)
    counts = list(range(1, 71)) if small else [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64, 70]
    _assert_rows_invariant(packed, counts)


def test_invariant_rows_beyond_one_product() -> None:
    packed = pack_linear_weight(_weight(96, 64), batch_invariant=True)
    _assert_rows_invariant(packed, [511, 512, 513, 1025, 1600])


def test_tiled_rows_are_bitwise_equal() -> None:
    _assert_rows_invariant(TiledWeight(_weight(300, 96)), list(range(1, 40)))
