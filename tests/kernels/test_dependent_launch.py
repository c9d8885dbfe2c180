"""Kernels launched with PDL wait for the previous kernel before anything else.

`compiling_for` checks the PTX of all kernels that the other tests compile.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

import triton
import triton.language as tl
from triton.runtime import JITFunction

from kernels import registry, silu_and_mul
from kernels.dependent_launch import DISABLE_PDL, dependent_kernel, wait_for_previous_kernel
from tests.support.kernels.aot import Binary, compiling_for, early_instructions
from tests.support.sources import sources


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled_for(capability: int) -> Binary:
    with compiling_for(capability) as compiled, registry.using("triton"):
        silu_and_mul(torch.ones(2, 64))
    (binary,) = compiled
    return binary


def test_every_kernel_that_is_launched_waits_first() -> None:
    found = []
    files = [one for one in sources("kernels") if Path(one.path).name.startswith("triton_")]
    for source in files:
        functions = {one.name: one for one in source.nodes if isinstance(one, ast.FunctionDef)}
        launched = {
            node.func.value.id
            for node in source.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
        for kernel in (functions[name] for name in launched & functions.keys()):
            decorator = ast.unparse(kernel.decorator_list[0]).partition("(")[0]
            body = kernel.body[1 if ast.get_docstring(kernel) else 0 :]
            first = ast.unparse(body[0])
            if (decorator, first) != ("dependent_kernel", "wait_for_previous_kernel()"):
                found.append(f"{source.path}: {kernel.name} is {decorator}, starts with {first}")
    assert found == []


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_are_launched_before_the_previous_one_has_completed(capability: int) -> None:
    binary = compiled_for(capability)
    assert binary.launches_dependent
    wait, access = binary.ptx.index("griddepcontrol.wait;"), binary.ptx.index("ld.global")
    assert wait < binary.ptx.index("griddepcontrol.launch_dependents;") < access


@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.long)])
def test_older_devices_have_no_such_instructions(capability: int) -> None:
    binary = compiled_for(capability)
    assert not binary.launches_dependent
    assert "griddepcontrol" not in binary.ptx


def test_a_kernel_without_a_wait_is_found() -> None:
    ptx = compiled_for(90).ptx
    assert early_instructions(ptx) == []
    missing = ptx.replace("griddepcontrol.wait;", "")
    assert any("ld.global" in one for one in early_instructions(missing))
    assert "ret;" in early_instructions(missing)


@dependent_kernel
def _multiply_kernel(x_ptr):
    wait_for_previous_kernel()
    row = tl.arange(0, 64)
    place = x_ptr + row[:, None] * 64 + row[None, :]
    x = tl.load(place)
    tl.store(place, tl.dot(x, x).to(tl.bfloat16))


def test_kernels_with_tensor_memory_are_launched_after_completion() -> None:
    """The previous kernel could wait for the tensor memory that they hold."""
    with compiling_for(100) as compiled:
        _multiply_kernel[1,](torch.zeros(64, 64, dtype=torch.bfloat16))
    (binary,) = compiled
    assert any("tcgen05.alloc" in one for one in early_instructions(binary.ptx))
    assert not binary.launches_dependent


@dependent_kernel
def _load_early_kernel(x_ptr):
    x = tl.load(x_ptr)
    wait_for_previous_kernel()
    tl.store(x_ptr, x + 1)


@dependent_kernel
def _return_early_kernel(x_ptr, count):
    if tl.program_id(0) >= count:
        return
    wait_for_previous_kernel()
    tl.store(x_ptr, 1)


@triton.jit
def _wait_kernel(x_ptr):
    wait_for_previous_kernel()
    tl.store(x_ptr, 1)


@pytest.mark.parametrize(
    ("kernel", "numbers", "reason"),
    [
        (_load_early_kernel, (), "ld.global"),
        (_return_early_kernel, (3,), "@%p"),
        (_wait_kernel, (), "launches_dependent"),
    ],
    ids=["load", "return", "launch"],
)
def test_a_kernel_that_waits_late_is_found(
    kernel: JITFunction[Any], numbers: tuple[int, ...], reason: str
) -> None:
    with compiling_for(90), pytest.raises(AssertionError, match=reason):
        kernel[1,](torch.zeros(4), *numbers)


@dependent_kernel
def _first_wait_kernel(x_ptr):
    wait_for_previous_kernel()
    tl.store(x_ptr, 1)


def test_it_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_PDL, "1")
    with compiling_for(90), pytest.raises(AssertionError, match="launches_dependent=False"):
        _first_wait_kernel[1,](torch.zeros(4))
    monkeypatch.setenv(DISABLE_PDL, "0")
    _first_wait_kernel.device_caches.clear()
    with compiling_for(90) as compiled:
        _first_wait_kernel[1,](torch.zeros(4))
    assert compiled[0].launches_dependent
