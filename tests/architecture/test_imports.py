"""What import-linter's contracts (pyproject.toml) do not say: circles, and what a process loads."""

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
    "worker.front.server",
    "worker.group",
    "worker.core.loop",
    "cluster.app",
    "cluster.cli.main",
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


def test_worker_package_imports_nothing() -> None:
    assert (ROOT / "worker" / "__init__.py").read_text() == ""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_stays_out_of_processes_that_need_none(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
