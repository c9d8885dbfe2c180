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

IMPORTS_TEST = re.compile(r"^ *(?:from|import) .*\b(?:test_|conftest\b)", re.MULTILINE)
"""Lines that may import a test."""

SLOW_IMPORTS = {"anthropic", "openai", "ray", "torch", "transformers", "triton"}
SLOW_ROOMS = (
    "cluster/app",
    "cluster/autoscaling/options",
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
        if IMPORTS_TEST.search(source.text)  # few files to parse
        for name in source.imports()
        for part in name.split(".")[:-1]
        if part.startswith("test_") or part == "conftest"
    ]
    assert found == []


def test_no_test_changes_where_modules_are_found() -> None:
    found = [
        source.path
        for source in sources("tests")
        if "sys.path." in source.text
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
        if _may_import_slowly(source.text)
        for name in source.imports(anywhere=False)
        if name.split(".")[0] in SLOW_IMPORTS or name.replace(".", "/").startswith(SLOW_ROOMS)
    ]
    assert found == []


def _may_import_slowly(text: str) -> bool:
    """Whether a file needs to be parsed, judged by how its import statements begin."""
    rooms = [room.rstrip("/").replace("/", ".") for room in SLOW_ROOMS]
    starts = [*SLOW_IMPORTS, *rooms, *(f"{room.rpartition('.')[0]} import" for room in rooms)]
    alternatives = "|".join(map(re.escape, starts))
    return re.search(rf"^(?:from|import) (?:{alternatives})", text, re.MULTILINE) is not None
