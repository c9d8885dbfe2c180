from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from kernels import OpRegistry, registry
from tests.support.sources import sources

ON_TORCH: frozenset[str] = frozenset()
"""Ops without a Triton kernel: their reference runs on every device."""


def test_every_declared_op_is_discovered() -> None:
    """A declaration that nothing imports is in no registry, and no test below covers it."""
    declared = {
        node.name
        for source in sources("kernels")
        for node in source.nodes
        if isinstance(node, ast.FunctionDef)
        if any(isinstance(name, ast.Name) and name.id == "op" for name in node.decorator_list)
    }
    assert declared == set(registry), "declare ops in kernels/NAME/__init__.py"
    assert len(declared) > 20


def test_ops_have_a_triton_kernel_unless_listed() -> None:
    """With its file under another name, a kernel would never be found."""
    assert {name for name in registry if not registry[name].has_kernel("triton")} == ON_TORCH


def test_importing_and_running_on_cpu_loads_no_triton() -> None:
    script = (
        "import sys, torch, kernels\n"
        "before = 'triton' in sys.modules\n"
        "kernels.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)\n"
        "kernels.silu_and_mul(torch.ones(2, 4))\n"
        "loaded = [m for m in sys.modules if m.startswith('kernels') and 'triton_' in m]\n"
        "assert not before and 'triton' not in sys.modules and not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_backend_selects_the_implementation() -> None:
    own = OpRegistry()

    @own.op
    def scale(x: torch.Tensor, factor: float = 2.0, *, offset: float = 0.0) -> torch.Tensor:
        """Scaled tensor."""
        return x * factor + offset

    @own.implements(scale, "triton")
    def negate(x: torch.Tensor, factor: float = 2.0, *, offset: float = 0.0) -> torch.Tensor:
        return -x * factor + offset

    x = torch.ones(1)
    assert scale(x).item() == 2
    assert scale(x, factor=3.0, offset=1.0).item() == 4
    with own.using("triton"):
        assert scale(x, 3.0, offset=1.0).item() == -2
    assert scale(x).item() == 2
    assert own.backend == "auto"
    assert scale.__doc__ == "Scaled tensor."
    assert inspect.signature(scale) == inspect.signature(own["scale"].reference)
    with pytest.raises(TypeError, match=r"scale\(\) takes from 1 to 2 positional arguments"):
        scale(x, 2.0, 0.0)  # type: ignore[misc]


def test_an_op_without_a_kernel_runs_its_reference() -> None:
    own = OpRegistry()

    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.__module__ = "kernels"  # which has no triton_kernel.py
    declared = own.op(triple)
    with own.using("triton"):
        assert [declared(torch.ones(1)).item() for _ in range(2)] == [3, 3]


def test_every_kernel_has_the_parameters_and_defaults_of_its_op() -> None:
    pytest.importorskip("triton")
    for name in sorted(set(registry) - ON_TORCH):
        op = registry[name]
        importlib.import_module(f"{op.package}.triton_kernel")
        with registry.using("triton"):
            kernel = op.on_cpu
        assert kernel is not op.reference
        assert inspect.signature(kernel) == inspect.signature(op.reference), name


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel backend"):
        OpRegistry().set_backend("cuda")  # type: ignore[arg-type]
