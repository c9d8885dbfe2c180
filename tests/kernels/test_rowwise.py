"""Elementwise functions have the same bits whatever other elements there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kernels import rowwise
from kernels.gate_and_mul import (
    clamped_silu_and_mul,
    clamped_swiglu,
    gelu_and_mul,
    silu_and_mul,
)

Function = Callable[[torch.Tensor], torch.Tensor]
F = torch.nn.functional
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "sigmoid": (rowwise.sigmoid, torch.sigmoid),
    "silu": (rowwise.silu, F.silu),
    "softplus": (rowwise.softplus, F.softplus),
    "gelu": (rowwise.gelu, F.gelu),
    "gelu_tanh": (rowwise.gelu_tanh, partial(F.gelu, approximate="tanh")),
}
"""The functions, and torch's of the same values."""
GATED: dict[str, Function] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "clamped_silu_and_mul": partial(clamped_silu_and_mul, limit=7.0),
    "clamped_swiglu": partial(clamped_swiglu, alpha=1.702, limit=7.0),
}
WIDTHS = (1, 2, 3, 4, 8, 15, 16, 17, 33, 48, 130, 256, 700)
THREADED = 40_000
"""Elements that torch splits between threads."""


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same rows, contiguous, as a part of wider ones, by columns, and in three dimensions."""
    yield x
    yield torch.cat((x, x), dim=1)[:, : x.shape[1]]
    yield torch.cat((x, x), dim=1)[:, x.shape[1] :]
    yield x.T.contiguous().T
    yield x.unflatten(0, (2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("threads")
def test_rows_are_computed_as_alone(name: str, dtype: torch.dtype) -> None:
    function, _ = FUNCTIONS[name]
    torch.manual_seed(0)
    for width in WIDTHS:
        count = 2 * (THREADED // width // 2 + 1) if width in (17, 48, 256, 700) else 64
        x = (torch.randn(count, width) * 3).to(dtype)
        picked = torch.randint(0, count, (64,))
        alone = torch.cat([function(x[row : row + 1].clone()) for row in picked])
        for rows in layouts(x):
            found = function(rows)
            assert found.shape == rows.shape
            assert torch.equal(found.reshape(x.shape)[picked], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.long), 5])
def test_bits_depend_on_the_value_only(name: str, dtype: torch.dtype, num_threads: int) -> None:
    """Not on shape, size or place. Threads divide elements at several sizes, GELU's at others."""
    function, _ = FUNCTIONS[name]
    torch.manual_seed(0)
    x = (torch.randn(4 * 32768 + 96) * 3).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = function(x)
    torch.set_num_threads(num_threads)
    try:
        for size in (1, 31, 64, 16384, 16448, 32768, 32800, 65536, 65568, 100_001, 4 * 32768):
            assert torch.equal(function(x[:size].clone()), expected[:size]), size
            assert torch.equal(function(x[7 : size + 7]), expected[7 : size + 7]), size
            assert torch.equal(function(x[:size].view(size, 1))[:, 0], expected[:size]), size
            wide = torch.stack((x[:size], x[:size]), dim=-1)
            assert torch.equal(function(wide[:, 1]), expected[:size]), size
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATED)
@pytest.mark.usefixtures("threads")
def test_gated_rows_are_computed_as_alone(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for width in WIDTHS:
        count = THREADED // width if width in (17, 700) else 64
        x = (torch.randn(count, 2 * width) * 3).to(dtype)
        picked = torch.randint(0, count, (64,))
        alone = torch.cat([GATED[name](x[row : row + 1].clone()) for row in picked])
        assert torch.equal(GATED[name](x)[picked], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, expected = FUNCTIONS[name]
    ends = torch.tensor([[-200.0, -20.5, -1e-6, 0.0, 1e-6, 19.5, 20.5, 200.0]])
    for x in (torch.randn(50, 37) * 4, ends, torch.empty(0, 5), torch.randn(7)):
        x = x.to(dtype)
        torch.testing.assert_close(
            function(x), expected(x), rtol=1e-5 if dtype.itemsize == 4 else 1e-2, atol=1e-6
        )
