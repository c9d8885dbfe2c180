"""Import rules beyond import-linter's contracts: cycles, and processes that load torch or Ray."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.paths import ROOT
from tests.support.sources import FLOORS, sources

TORCH_FREE = [
    "router.gateway",
    "router.api.app",
    "worker.frontend.server",
    "worker.group",
    "worker.core.loop",
    "cluster.app",
    "cluster.cli.main",
    "cluster.cli.serve",
    "worker.rank.preflight",
]


def test_no_module_imports_itself_in_the_end() -> None:
    modules = {source.module for source in sources(*FLOORS)}
    graph = {
        source.module: {
            name if name in modules else name.rpartition(".")[0] for name in source.imports()
        }
        for source in sources(*FLOORS)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_package_has_a_circle_among_its_rooms() -> None:
    """A room is a file or a subpackage: `core/engine.py`, or `core/cache` as a whole."""
    files = sources(*FLOORS, "deploy")
    modules = {source.module for source in files}
    packages = {name.rpartition(".")[0] for name in modules if "." in name}
    circles = []
    for package in sorted(packages):
        graph: dict[str, set[str]] = {}
        for source in files:
            if (room := _room_in(package, source.module)) is None:
                continue
            for name in source.imports():
                module = name if name in modules else name.rpartition(".")[0]
                other = _room_in(package, module)
                if other is not None and other != room and module in modules:
                    graph.setdefault(room, set()).add(other)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circles.append(f"{package}: {' -> '.join(error.args[1])}")
    assert circles == []


def _room_in(package: str, module: str) -> str | None:
    """The file or subpackage of a package that a module is in; None for a module elsewhere."""
    inside = module.removeprefix(f"{package}.")
    return None if inside == module else inside.split(".")[0]


def test_worker_package_imports_nothing() -> None:
    assert (ROOT / "worker" / "__init__.py").read_text() == ""


@pytest.mark.slow
def test_torch_stays_out_of_processes_that_need_none() -> None:
    """A single process imports all of them, the gateway's first, which must not load Ray either: if
    they together do not load torch, none does."""
    code = f"""
import importlib, sys
for module in {TORCH_FREE}:
    importlib.import_module(module)
    if "torch" in sys.modules:
        sys.exit(f"{{module}} imports torch")
    if module.startswith("router.") and "ray" in sys.modules:
        sys.exit(f"{{module}} imports Ray")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
