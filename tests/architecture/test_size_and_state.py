"""Files and functions stay short; modules hold no state; scheduling reads no clock."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.sources import FLOORS, Source, sources

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
WALL_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"}
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}
ALL = (*FLOORS, "deploy")


def test_files_are_short() -> None:
    lengths = {source.path: len(source.text.splitlines()) for source in sources(*ALL)}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = []
    for source, node in _nodes(sources(*ALL)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.body[0].lineno + 1  # without the signature
            if length > MAX_FUNCTION_LINES:
                long.append(f"{source.path}: {node.name} has {length} lines")
    assert long == []


def test_scheduling_reads_no_wall_clock() -> None:
    scheduling = sources("worker/core/scheduler", "worker/core/cache")
    imported = {
        source.path
        for source in scheduling
        for name in source.imports()
        if name in {f"time.{clock}" for clock in WALL_CLOCKS}
    }
    read = {
        source.path
        for source, node in _nodes(scheduling)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "time" and node.attr in WALL_CLOCKS
    }
    assert imported | read == set()


def test_modules_hold_no_mutable_state() -> None:
    found = []
    for source in sources(*FLOORS):
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
            # Constants are upper case or Final; only the op registry is filled at import.
            is_constant = all(name.lstrip("_").isupper() for name in names)
            if not is_constant and "Final" not in declared:
                found.append(f"{source.path}: {declared.splitlines()[0]}")
    assert found == []


def test_functions_rebind_no_globals() -> None:
    nodes = _nodes(sources(*FLOORS))
    assert [source.path for source, node in nodes if isinstance(node, ast.Global)] == []


def test_launches_compute_sizes_with_plain_functions() -> None:
    """Triton's own take a quarter of a launch's time on the host."""
    functions = {"triton.cdiv", "triton.next_power_of_2"}
    found = {
        source.path
        for source, node in _nodes(sources("kernels"))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in functions
    }
    imported = {one.path for one in sources("kernels") if not functions.isdisjoint(one.imports())}
    assert found | imported == set()


def test_nothing_names_a_machine() -> None:
    found = {
        source.path: name.group()
        for source in (*sources(*ALL), *sources("tests"))
        if (name := re.search(r"/(?:work|root|home|Users)/\w+", source.text))
    }
    assert found == {}


def _nodes(files: tuple[Source, ...]) -> Iterator[tuple[Source, ast.AST]]:
    for source in files:
        for node in source.nodes:
            yield source, node


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        function = value.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        return name in MUTABLE_CALLS
    return False
