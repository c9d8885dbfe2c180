"""Default size of the host-memory tier, for nodes and containers made of files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank.host_memory import (
    REQUEST_VARIABLE,
    MemoryBound,
    count_gpus,
    default_host_bytes,
    tightest_bound,
)
from worker.rank.memory import plan_host_pages

GIB = 1 << 30
TOTAL, FREE = 1000 * GIB, 900 * GIB


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=TOTAL, available=FREE)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)


def write_cgroup(root: Path, line: str, folder: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(f"{line}\n")
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(f"{text}\n")


def test_half_of_the_node_is_left_to_others(tmp_path: Path) -> None:
    bound = tightest_bound(tmp_path, {})
    assert bound == MemoryBound("this node", TOTAL, FREE)
    assert bound.pinnable == 400 * GIB
    assert MemoryBound("this node", TOTAL, 300 * GIB).pinnable == 0


def test_limits_of_cgroups_come_first(tmp_path: Path) -> None:
    statistics = f"inactive_file {6 * GIB}\nactive_file {4 * GIB}\nshmem {GIB}"
    limited = {"memory.max": str(200 * GIB), "memory.current": str(50 * GIB)}
    # In a container: its cgroup is the mount.
    write_cgroup(tmp_path / "pod", "0::/", "", {**limited, "memory.stat": statistics})
    bound = tightest_bound(tmp_path / "pod", {})
    assert bound == MemoryBound("the cgroup", 200 * GIB, 160 * GIB)
    assert bound.pinnable == 60 * GIB
    # On a node: the limit is that of an outer one.
    write_cgroup(tmp_path / "node", "0::/a/b", "a/b", {"memory.max": "max", "memory.current": "1"})
    write_cgroup(tmp_path / "node", "0::/a/b", "a", limited)
    assert tightest_bound(tmp_path / "node", {}).pinnable == 50 * GIB
    # Version 1.
    files = {"memory.limit_in_bytes": str(100 * GIB), "memory.usage_in_bytes": str(10 * GIB)}
    write_cgroup(tmp_path / "v1", "3:cpu,memory:/kubepods/x", "memory", files)
    assert tightest_bound(tmp_path / "v1", {}).pinnable == 40 * GIB
    unlimited = {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "1"}
    write_cgroup(tmp_path / "free", "3:memory:/", "memory", unlimited)
    assert tightest_bound(tmp_path / "free", {}).source == "this node"


def test_a_pod_does_not_exceed_its_request(tmp_path: Path) -> None:
    limited = {"memory.max": str(200 * GIB), "memory.current": str(20 * GIB)}
    write_cgroup(tmp_path, "0::/", "", limited)
    bound = tightest_bound(tmp_path, {REQUEST_VARIABLE: str(80 * GIB)})
    assert bound == MemoryBound("the pod's memory request", 80 * GIB, 60 * GIB)
    for none in ("0", "", "1Gi"):
        assert tightest_bound(tmp_path, {REQUEST_VARIABLE: none}).source == "the cgroup"


def test_ranks_share_a_node(tmp_path: Path) -> None:
    bound = tightest_bound(tmp_path, {})
    assert default_host_bytes(bound, 8, 60 * GIB) == 50 * GIB
    assert default_host_bytes(bound, 1, 60 * GIB) == 120 * GIB, "twice the device's cache"
    assert default_host_bytes(bound, 64, 60 * GIB) == 0, "not worth it"
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    assert count_gpus(tmp_path) == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (gpus / name).mkdir(parents=True)
    assert count_gpus(tmp_path) == 2


def test_the_tier_is_on_by_default_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(is_integrated=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    bound = MemoryBound("this node", TOTAL, FREE)
    monkeypatch.setattr("worker.rank.memory.tightest_bound", lambda: bound)
    monkeypatch.setattr("worker.rank.memory.count_gpus", lambda: 8)

    def pages(device: str = "cuda", **options: object) -> int:
        config = EngineConfig.of(model="any", **options)
        group = TensorParallelGroup.alone(torch.device(device))
        return plan_host_pages(config, group=group, page_bytes=1 << 20, num_pages=40 << 10)

    assert pages() == 50 << 10
    assert pages(host_cache_gib=0.0) == 0
    assert pages(host_cache_gib=3.0) == 3 << 10
    assert pages(host_cache_gib=3.0, device="cpu") == 3 << 10
    assert pages(device="cpu") == 0
    assert pages(enable_prefix_caching=False) == 0
    properties.is_integrated = 1
    assert pages() == 0, "memory of CPU and GPU is the same"
