"""Model code and kernels use position-dependent functions of torch through one module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.support.sources import FLOORS, Source, sources

HOME = "kernels/rowwise.py"
"""Module that makes these functions independent of the position."""
PLACED = {
    *("sigmoid", "silu", "softplus", "gelu", "elu", "selu", "celu", "mish", "glu"),
    *("sinh", "pow", "float_power", "expit"),
}
"""Functions for which torch on CPU computes the end of a contiguous run differently. Not exp2,
which decodes scales of weights, once for all batches."""
MODULES = {
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.special",
    "torch.ops.aten",
    "torch.Tensor",
}
"""Namespaces with these functions; tensors have them as methods."""


def placed_calls(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Uses of these functions among the nodes of a file: a function of torch by its name, or a
    method of any object that is called."""
    names = _names_of_torch(nodes)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            function = node.attr.rstrip("_").lower()
            owner = _dotted(node.value, names)
            if function in PLACED and (
                owner in MODULES
                or (id(node) in called and not owner.startswith(("rowwise", "math")))
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Name) and names.get(node.id, "").startswith("torch."):
            function = names[node.id].rpartition(".")[2]
            if function.rstrip("_").lower() in PLACED:
                yield f"{node.lineno}: {ast.unparse(node)}"


def _names_of_torch(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Dotted names of torch by the names that a module imports or assigns."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith("torch"):
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            dotted = _dotted(node.value, names)
            if dotted.startswith("torch.") and dotted in MODULES:
                names[node.targets[0].id] = dotted
    return names


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """A dotted name in full; empty for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def is_torch_code(source: Source) -> bool:
    """Whether a file computes with torch, outside of Triton kernels."""
    return "torch" in source.text and "import triton" not in source.text and source.path != HOME


def test_functions_that_depend_on_the_place_are_called_in_one_module_only() -> None:
    found = {
        source.path: calls
        for source in sources(*FLOORS)
        if is_torch_code(source) and (calls := list(placed_calls(source.nodes)))
    }
    assert found == {}, f"use the functions of {HOME}, or --batch-invariant breaks"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ny = torch.sigmoid(x)",
        "y = x.sigmoid()",
        "y = (x + 1).float().sigmoid_()",
        "import torch\nmlp = MLP(torch.nn.functional.gelu)",
        "import torch.nn.functional as F\ny = F.silu(x, inplace=True)",
        "from torch.nn import functional as f\ny = f.softplus(x)",
        "from torch.nn.functional import silu\nmlp = MLP(silu)",
        "import torch\ny = torch.ops.aten.silu.out(x, out=y)",
        "import torch\nact = torch.nn.SiLU()",
        "import torch\nF = torch.nn.functional\ny = F.mish(x)",
        "y = x.pow(1.5)",
    ],
)
def test_a_call_is_found(code: str) -> None:
    assert list(placed_calls(Source("", code).nodes))


@pytest.mark.parametrize(
    "code",
    [
        "from kernels import rowwise\ny = rowwise.sigmoid(x)",
        "scoring = 'sigmoid' if moe.sigmoid else 'softmax'",
        "import torch\ny = torch.exp(x).log1p().tanh()",
        "import math\ny = math.pow(2, 3)",
    ],
)
def test_other_code_is_not(code: str) -> None:
    assert not list(placed_calls(Source("", code).nodes))
