"""The project's Python files, parsed, as the architecture tests look at them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("cluster", "router", "worker", "kernels")


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    """Relative to the repository."""
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[tuple[str, bool]]:
        """Modules imported anywhere in the file, and whether at run time on module level."""
        deferred = {
            id(node)
            for scope in ast.walk(self.tree)
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or _type_checking(scope)
            for node in ast.walk(scope)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, id(node) not in deferred
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path} has a relative import"
                module = node.module or ""
                yield module, id(node) not in deferred
                for alias in node.names:
                    yield f"{module}.{alias.name}", id(node) not in deferred

    def typing_only_imports(self) -> set[str]:
        """Modules imported under `if TYPE_CHECKING:` alone."""
        return {
            inner.module or ""
            for node in ast.walk(self.tree)
            if _type_checking(node)
            for inner in ast.walk(node)
            if isinstance(inner, ast.ImportFrom)
        }


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """All files below these folders of the repository."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            found.append(Source(str(path.relative_to(ROOT)), text, ast.parse(text)))
    return tuple(found)


def _type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )
