"""Default size of the host-memory tier: the part of this node's memory that its ranks may pin.
Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

REQUEST_VARIABLE = "RAYFLEET_MEMORY_REQUEST"
"""Environment variable, set by the Helm chart, with the container's memory request in bytes: a pod
that uses more may be evicted when its node runs out of memory."""
_RESERVED = 0.5
"""Fraction of memory reserved for other uses: Ray's object store (30 % of a node by default), the
page cache of weights, and other containers that follow the same rule."""
_MAX_RATIO = 2.0
"""Maximum size relative to the KV cache on the device. If conversations of agents pause for
minutes, twice the device's cache recovers most of the prefix hits; more memory takes longer to pin.
"""
_MIN_RATIO = 0.125
"""Minimum size relative to the KV cache on the device: a smaller tier is not worth the copies."""


class MemoryBound(NamedTuple):
    """A limit on the memory that this process can use."""

    source: str
    total: int
    """The limit in bytes."""
    free: int
    """Remaining bytes, including reclaimable page cache."""

    @property
    def pinnable(self) -> int:
        """Bytes that may be pinned: the free ones, minus those reserved for other uses."""
        return max(0, self.free - int(_RESERVED * self.total))


def tightest_bound(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> MemoryBound:
    """The bound that allows the least memory to be pinned: the node's memory, cgroup limits, or the
    container's memory request.

    Args:
        root: folder that contains `proc` and `sys`.
        environment: environment variables.
    """
    memory = psutil.virtual_memory()
    bounds = [MemoryBound("this node", memory.total, memory.available)]
    for limit, used in _cgroup_limits(root):
        bounds.append(MemoryBound("the cgroup", limit, max(0, limit - used)))
        request = environment.get(REQUEST_VARIABLE, "")
        if request.isdecimal() and int(request):
            free = max(0, int(request) - used)
            bounds.append(MemoryBound("the pod's memory request", int(request), free))
    return min(bounds, key=lambda bound: bound.pinnable)


def count_gpus(root: Path = Path("/")) -> int:
    """Number of this node's GPUs, including those that are not visible to this process; 0 if
    unknown."""
    return sum(1 for _ in (root / "proc/driver/nvidia/gpus").glob("*"))


def default_host_bytes(bound: MemoryBound, num_ranks: int, cache_bytes: int) -> int:
    """Default size in bytes of one rank's host-memory tier; 0 if it would be too small to be
    useful.

    Args:
        bound: limit on the node's memory.
        num_ranks: maximum number of ranks on the node, among which the memory is divided.
        cache_bytes: bytes of the rank's KV cache on the device.
    """
    num_bytes = min(bound.pinnable // max(1, num_ranks), int(_MAX_RATIO * cache_bytes))
    return num_bytes if num_bytes >= _MIN_RATIO * cache_bytes else 0


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and bytes in use of each cgroup with a memory limit that contains this process."""
    for folder, limit_name, used_name, prefix in _cgroups(root):
        limit = _read_number(folder / limit_name)
        used = _read_number(folder / used_name)
        if limit is None or used is None or limit >= psutil.virtual_memory().total:
            continue
        yield limit, max(0, used - _reclaimable(folder / "memory.stat", prefix))


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Cgroups that contain this process, innermost first: folder, names of the limit and usage
    files, and the prefix of hierarchical statistics."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "")
        mount = root / "sys/fs/cgroup"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            names, mount = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
                mount / "memory",
            )
        # In a container, the path is relative to the host's root, and the mount is the container's
        # own cgroup.
        folder = mount / path.lstrip("/")
        inside = [folder, *folder.parents] if folder.is_dir() else [mount]
        for one in inside:
            yield (one, *names)
            if one == mount:
                break


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable(statistics: Path, prefix: str) -> int:
    """Bytes of page cache in a cgroup's memory statistics, excluding shared memory."""
    try:
        rows: Sequence[list[str]] = [line.split() for line in statistics.read_text().splitlines()]
    except OSError:
        return 0
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names)
