"""Who may import whom: arrows point down only, and some floors know neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.sources import FLOORS, ROOT, sources

ALLOWED_BELOW = {
    "cluster": {"cluster", "router", "worker", "kernels"},
    "router": {"router", "worker"},
    "worker": {"worker", "kernels"},
    "kernels": {"kernels"},
}

FORBIDDEN = [
    # (path prefix, modules, except in)
    ("router/", ("torch", "ray", "transformers.AutoTokenizer", "xgrammar"), ()),
    ("worker/", ("ray",), ("worker/group.py",)),
    ("worker/core/scheduler/", ("torch", "numpy"), ()),
    ("worker/core/cache/", ("torch",), ()),
    ("worker/wire/", ("torch", "ray", "transformers.AutoTokenizer"), ()),
    ("worker/front/server.py", ("torch", "ray"), ()),
    ("worker/front/attachment.py", ("torch", "ray"), ()),
    ("kernels/", ("ray", "msgspec"), ()),
]

TORCH_FREE = [
    "router.gateway",
    "router.api.app",
    "worker.front.server",
    "worker.group",
    "worker.core.loop",
    "cluster.app",
    "cluster.cli.main",
]


def is_below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def test_arrows_point_down() -> None:
    faults = []
    for source in sources(*FLOORS):
        floor = source.path.split("/")[0]
        for module, _ in source.imports():
            other = module.split(".")[0]
            upward = other in FLOORS and other not in ALLOWED_BELOW[floor]
            past_the_wire = floor == "router" and other == "worker"
            past_the_wire = past_the_wire and not is_below(module, "worker.wire")
            if upward or past_the_wire or other in ("tests", "deploy"):
                faults.append(f"{source.path} imports {module}")
    assert faults == []


@pytest.mark.parametrize(("prefix", "modules", "exempt"), FORBIDDEN)
def test_forbidden_imports(prefix: str, modules: tuple[str, ...], exempt: tuple[str, ...]) -> None:
    for source in sources(*FLOORS):
        if not source.path.startswith(prefix) or source.path in exempt:
            continue
        typing_only = source.typing_only_imports()
        for module, _ in source.imports():
            if module in typing_only or module.rpartition(".")[0] in typing_only:
                continue
            for forbidden in modules:
                assert not is_below(module, forbidden), f"{source.path} imports {module}"


def test_worker_package_imports_nothing() -> None:
    assert (ROOT / "worker" / "__init__.py").read_text() == ""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_stays_out_of_processes_that_need_none(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
