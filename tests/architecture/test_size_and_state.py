"""Files and functions stay short; modules hold no state; scheduling reads no clock."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.sources import FLOORS, Source, sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
WALL_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"}
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}
ALL_SOURCES = sources(*FLOORS, "deploy")


@pytest.mark.parametrize("source", ALL_SOURCES, ids=lambda s: s.path)
def test_files_and_functions_are_short(source: Source) -> None:
    assert len(source.text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.body[0].lineno + 1  # a signature is no code
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize(
    "source", sources("worker/scheduler", "worker/cache"), ids=lambda s: s.path
)
def test_scheduling_reads_no_wall_clock(source: Source) -> None:
    for module, _ in source.imports():
        assert module.split(".")[0] != "datetime", f"{source.path} imports {module}"
        if module.startswith("time."):
            assert module.split(".")[1] not in WALL_CLOCKS, f"{source.path} imports {module}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = (node.value.id, node.attr)
            assert used[0] != "time" or used[1] not in WALL_CLOCKS, f"{source.path} reads a clock"


@pytest.mark.parametrize("source", sources(*FLOORS), ids=lambda s: s.path)
def test_modules_hold_no_mutable_state(source: Source) -> None:
    for statement in source.tree.body:
        if isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            value: ast.expr | None = statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names, value = [statement.target.id], statement.value
        else:
            continue
        if names == ["__all__"] or value is None or not _is_mutable(value):
            continue
        declared = ast.unparse(statement)
        # Constants say so by name or by type; an op registry is the one thing that fills up.
        is_constant = all(name.lstrip("_").isupper() for name in names)
        assert is_constant or "Final" in declared, f"{source.path}: {declared.splitlines()[0]}"


@pytest.mark.parametrize("source", sources(*FLOORS), ids=lambda s: s.path)
def test_functions_rebind_no_globals(source: Source) -> None:
    assert not any(isinstance(node, ast.Global) for node in ast.walk(source.tree))


@pytest.mark.parametrize("source", [*ALL_SOURCES, *sources("tests")], ids=lambda s: s.path)
def test_nothing_names_a_machine(source: Source) -> None:
    found = re.search(r"/(?:work|root|home|Users)/\w+", source.text)
    assert found is None, f"{source.path} names {found and found.group()}"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        function = value.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        return name in MUTABLE_CALLS
    return False
