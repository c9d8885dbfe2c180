"""Structure of the tests: shared code is in tests/support, folders mirror the packages."""

from __future__ import annotations

import ast
import re

from tests.support.paths import ROOT
from tests.support.sources import FLOORS, sources

NO_PACKAGE = {
    "kernels/interpreter",
    "worker/engine",  # whole engines: core and rank together
    "worker/engine/diffusion",
    "worker/rank/interpreter",
}

SLOW_IMPORTS = {"ray", "torch", "transformers", "triton"}
SLOW_ROOMS = (
    "cluster/app",
    "worker/rank/",
    "worker/models/",
    "tests/support/engines/",
    "tests/support/checkpoints/",
)
"""Modules and packages that import torch or Ray."""


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
        for node in source.nodes
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


def test_unit_tests_import_nothing_that_takes_seconds() -> None:
    """`make unit` skips files that are slow as a whole; all its processes import the others."""
    makefile = (ROOT / "Makefile").read_text()
    [listed] = re.findall(r"^UNIT_TESTS := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    folders = tuple(f"{folder}/" for folder in listed.replace("\\", "").split())
    found = [
        f"{source.path}: {name}"
        for source in sources("tests")
        if source.path.startswith(folders)
        if "\npytestmark = pytest.mark.slow\n" not in source.text
        for name in source.imports(anywhere=False)
        if name.split(".")[0] in SLOW_IMPORTS or name.replace(".", "/").startswith(SLOW_ROOMS)
    ]
    assert found == []
