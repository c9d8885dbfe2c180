"""The project's Python files for the architecture tests, parsed and walked once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from tests.support.paths import ROOT

FLOORS = ("cluster", "router", "worker", "kernels")


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    """Path relative to the repository."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the file."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Name under which the module is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def imports(self, *, anywhere: bool = True) -> Iterator[str]:
        """Dotted names of imported modules or their members, including imports for types only.

        Args:
            anywhere: whether to include imports anywhere in the file, not only at module level.
        """
        for node in self.nodes if anywhere else self.tree.body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(*folders: str) -> tuple[Source, ...]:
    """All files below these folders of the repository."""
    return tuple(source for folder in folders for source in _sources_below(folder))


@cache
def _sources_below(folder: str) -> tuple[Source, ...]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        found.append(Source(str(path.relative_to(ROOT)), path.read_text()))
    return tuple(found)
