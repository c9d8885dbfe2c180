"""Shared fixtures: small checkpoints with random weights; and which tests share a process.

`make test` runs one more process than there are cores (pytest-xdist). Tests of a file share a
process, because of their fixtures. All tests that start Ray are one group, so that no two fleets
compete for processors, and so are tests that read all sources, and tests of whole engines. The
longest groups start first: those that start Ray, then files that take 15 s or more, so that none of
them is left over at the end.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("tests.support")

# There is a process for every processor. With more threads than that, OpenMP threads spin while
# they wait for others that have no processor. Tests of threads set their number themselves; child
# processes inherit this before they import torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

STARTS_RAY = ("tests/helm/test_chart_runs.py", "tests/e2e/")
"""In this order: the fleet of tests/e2e runs until its last test kills it."""
READ_SOURCES = "tests/architecture/"
ENGINES = (
    "tests/worker/engine/",
    "tests/worker/frontend/test_hung_ranks.py",
    "tests/worker/plan/test_rendezvous.py",
    "tests/worker/rank/test_tensor_parallel.py",
    "tests/worker/test_llm.py",
    "tests/worker/test_niceness.py",
    "tests/router/test_contradictions.py",
    "tests/cluster/bench/test_bench_throughput.py",
    "tests/deploy/benchmarks/test_bench_admission.py",
)
"""They share a server that has imported torch, from which ranks are forked, and compilers of
grammars."""
HAS_GPU = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
"""Whether there may be a GPU: the driver's device of NVIDIA, WSL or AMD."""
COMPILE = ("tests/kernels/test_triton_compiles.py", "tests/cuda/test_binaries.py")
"""They launch the same kernels, which a process compiles once. Those that `make check-cuda` adds
have little in common, and take long."""
CLIENTS = tuple(
    f"tests/router/test_{name}.py"
    for name in (
        *("agent_loops", "anthropic_client", "fields", "logprobs", "openai_client", "responses"),
        *("tools", "workers"),
    )
)
"""They use the clients of OpenAI and Anthropic, whose import takes 3 s of CPU time."""
TAKE_LONG = (
    *ENGINES,
    "tests/kernels/test_triton_interpreter.py",
    "tests/kernels/test_triton_compiles.py",
    "tests/cuda/test_races.py",
    "tests/cluster/test_haproxy_guard.py",
    "tests/cluster/bench/test_bench_job.py",
    "tests/router/test_linear_time.py",
    "tests/worker/models/test_families.py",
    "tests/cuda/test_ragged_graphs.py",
    "tests/cuda/test_warm_up.py",
    "tests/deploy/test_demo",
    "tests/deploy/benchmarks/test_bench_fdfo.py",
    "tests/worker/test_hub.py",
)


def pytest_configure() -> None:
    from tests.support.effort import cases

    # No deadline, since loaded machines are slow.
    settings.register_profile(
        "ours",
        max_examples=cases(100),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("ours")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collects garbage once, so that pytest's ten collections before it exits find few objects.

    They look for errors in finalizers, and took 2 s of CPU time in each process.
    """
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str | None:
    return None if HAS_GPU else "no GPU: files test_*_gpu.py are left out"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files that need a GPU have hundreds of tests, which each process would collect and skip."""
    return True if collection_path.name.endswith("_gpu.py") and not HAS_GPU else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection while modules are imported.

    The imported objects stay until the end: some 850,000, which a full collection walks in a
    second, 5 of 13 CPU seconds in each process. Later collections skip them, and run after 5,000
    new objects instead of 700: they took 5 % of the gateway's tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(5000, 10, 10)
        gc.enable()


def pytest_itemcollected(item: pytest.Function) -> None:
    from tests.support.effort import cases

    if is_hypothesis_test(item.obj) or getattr(item.module, "cases", None) is cases:
        item.add_marker("randomized")


@pytest.fixture(autouse=True)
def _niceness_stays() -> Iterator[None]:
    """Checks that a test keeps the process's priority.

    A test that lowers it, as ranks do, would also lower it for all later tests and their children,
    which would hardly run beside other processes.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0)
    yield
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0)) == before, (
        "priority or session of this process has changed"
    )


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Speeds up garbage collection in a module's tests by skipping the objects of earlier tests,
    which take up to a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat checkpoint with random weights, see `write_tiny_chat`."""
    from tests.support.checkpoints.chat import write_tiny_chat

    return write_tiny_chat(tmp_path_factory.mktemp("models") / "tiny-chat")


class FileScheduling(LoadScopeScheduling):
    """Runs the tests of a file in one process, and likewise all that start Ray, all that read
    sources, all that compile most kernels, all that import official clients, and all of whole
    engines."""

    def _split_scope(self, nodeid: str) -> str:
        from tests.support.effort import IS_LONG

        if nodeid.startswith(STARTS_RAY):
            return "ray"
        if nodeid.startswith(COMPILE) and not IS_LONG:
            return "compile"
        if nodeid.startswith(CLIENTS):
            return "clients"
        if nodeid.startswith(ENGINES) and not IS_LONG:
            return "engines"
        return READ_SOURCES if nodeid.startswith(READ_SOURCES) else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    # HAZARD: pytest-xdist 3.8 stores the marker `xdist_group` in an attribute that pytest 9.2
    # ignores, so `--dist loadgroup` groups nothing.
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = (*STARTS_RAY, *TAKE_LONG)

    def place(item: pytest.Item) -> int:
        found = (at for at, path in enumerate(order) if item.nodeid.startswith(path))
        return next(found, len(order))

    items.sort(key=place)
