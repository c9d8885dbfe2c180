"""The tests' own house: what they share is in tests/support, their folders are the packages'."""

from __future__ import annotations

import ast

from tests.support.paths import ROOT
from tests.support.sources import FLOORS, sources

NO_PACKAGE = {
    "kernels/interpreter",
    "worker/engine",  # whole engines: core and rank together
    "worker/engine/diffusion",
    "worker/rank/interpreter",
}


def test_no_test_imports_another() -> None:
    found = [
        f"{source.path}: {name}"
        for source in sources("tests")
        for name in source.imports()
        for part in name.split(".")[:-1]
        if part.startswith("test_") or part == "conftest"
    ]
    assert found == []


def test_no_test_changes_where_modules_are_found() -> None:
    found = [
        source.path
        for source in sources("tests")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("sys.path.")
    ]
    assert found == []


def test_folders_are_those_of_the_packages() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests").as_posix()
        for floor in FLOORS
        for path in (ROOT / "tests" / floor).rglob("test_*.py")
    }
    strays = {folder for folder in folders - NO_PACKAGE if not (ROOT / folder).is_dir()}
    assert strays == set()
