"""Checks of `rayfleet doctor`, on values that `cluster.cli.doctor` reads from the machine.

A finding is one line; if something is wrong, it includes the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from worker.rank.host_memory import MemoryBound, default_host_bytes

GIB = 1 << 30
OLDEST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""Minimum NVIDIA driver version per major version of CUDA (NVIDIA's "CUDA Compatibility")."""
SHARED_MEMORY_GIB = 1
"""GiB of /dev/shm needed for Ray's object store and NCCL's buffers between the ranks of a node;
also the value in the Helm chart."""
OPEN_FILES = 4096
"""Open file limit below which Ray warns. HAProxy and gateways each need two files per client."""
MAX_DISK_USAGE = 0.95
"""Fraction of the disk in use above which Ray stores no objects (local_fs_capacity_threshold)."""


class Finding(NamedTuple):
    """One line of the report: verdict and text."""

    verdict: Literal["ok", "note", "bad"]
    text: str


class Gpu(NamedTuple):
    """One GPU, as reported by its driver."""

    name: str
    memory_bytes: int
    capability: tuple[int, ...] = ()
    """Compute capability; empty if unknown."""


def check_requirements(
    requirements: Mapping[str, Sequence[str]], versions: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks that each distribution's requirements are installed in a compatible version.

    Args:
        requirements: the `Requires-Dist` lines of each distribution.
        versions: installed versions by canonical name of the distribution.
    """
    broken = 0
    for distribution, lines in requirements.items():
        for line in lines:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            installed = versions.get(canonicalize_name(requirement.name))
            needed = f"{requirement.name}{requirement.specifier}"
            if installed is not None and requirement.specifier.contains(installed, True):
                continue
            broken += 1
            state = "it is not installed" if installed is None else f"{installed} is installed"
            yield Finding(
                "bad",
                f"{distribution} {versions.get(distribution, '')} requires {needed}, but {state}: "
                f"pip install '{needed}', or use constraints.txt in a new environment",
            )
    if not broken:
        yield Finding("ok", f"all requirements of {', '.join(requirements)} are installed")


def check_gpu(index: int, gpu: Gpu) -> Finding:
    """Checks that the kernels support a GPU's compute capability."""
    from worker.rank.dtype import MIN_CAPABILITY

    text = f"GPU {index}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB"
    if gpu.capability and gpu.capability < MIN_CAPABILITY:
        minimum, found = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, gpu.capability))
        return Finding(
            "bad",
            f"{text}: compute capability {found} is not supported: {minimum} or higher is required",
        )
    return Finding("ok", text)


def check_offloading(bound: MemoryBound, gpus: Sequence[Gpu], num_gpus: int) -> Finding:
    """Finding on the host memory that workers use by default for KV pages evicted from GPUs.

    Args:
        bound: memory of this machine or container.
        gpus: visible GPUs.
        num_gpus: number of GPUs of the machine, which share the memory.
    """
    # The KV cache is not allocated yet; it is at most the GPU's memory.
    num_bytes = default_host_bytes(bound, num_gpus, min(gpu.memory_bytes for gpu in gpus))
    memory = f"{bound.free / GIB:.1f} of {bound.total / GIB:.1f} GiB of {bound.source} are free"
    if not num_bytes:
        return Finding(
            "note",
            f"KV offloading: {memory}, too little to use it by default; evicted prefixes are "
            "recomputed. Free memory or raise its limit, or set --host-cache-gib",
        )
    return Finding(
        "ok",
        f"KV offloading: up to {num_bytes / GIB:.1f} GiB of host memory per GPU by default "
        f"({memory}); set --host-cache-gib to change it",
    )


def check_driver(built_for: str | None, driver: str | None) -> Finding:
    """Checks that the NVIDIA driver is recent enough for this build of torch.

    Args:
        built_for: CUDA version that torch was built for; None for a CPU build.
        driver: version of the driver; None if there is none.
    """
    if built_for is None and driver is None:
        return Finding("note", "no NVIDIA driver, and torch is a CPU build: models run on the CPU")
    if built_for is None:
        return Finding(
            "note",
            f"NVIDIA driver {driver} is installed, but torch is a CPU build, so models run on the "
            "CPU: install a CUDA build of torch",
        )
    if driver is None:
        return Finding(
            "note",
            f"torch is built for CUDA {built_for}, but there is no NVIDIA driver: models run on "
            "the CPU (containers need docker run --gpus all)",
        )
    oldest = OLDEST_DRIVERS.get(int(built_for.split(".")[0]))
    if oldest is None:
        return Finding("note", f"torch is built for CUDA {built_for}; the driver is {driver}")
    if Version(driver) < Version(oldest):
        return Finding(
            "bad",
            f"NVIDIA driver {driver} is too old: torch's CUDA {built_for} needs {oldest} or newer "
            "to detect GPUs. Update the driver, or install torch for an older CUDA version "
            '(README, "Install")',
        )
    return Finding("ok", f"NVIDIA driver {driver} supports CUDA {built_for}")


def check_launchers(
    compiler: str | None, header: Path, *, has_header: bool, gpus: Sequence[Gpu]
) -> Finding:
    """Checks that Triton can compile its driver and launchers, which it does when it launches the
    first kernel.

    Args:
        compiler: C compiler that Triton uses; None if there is none.
        header: path of Python.h.
        has_header: whether Python.h exists.
        gpus: GPUs of this machine; if empty, Triton is not used.
    """
    missing = []
    if compiler is None:
        missing.append("a C compiler (apt install gcc, or set CC)")
    if not has_header:
        missing.append(f"{header} (apt install python3-dev, or dnf install python3-devel)")
    if missing:
        return Finding(
            "bad" if gpus else "note", f"Triton's kernels on GPUs need {' and '.join(missing)}"
        )
    return Finding("ok", f"C compiler {compiler} and Python headers found: Triton can use GPUs")


def check_weights(
    weight_bytes: int,
    gpus: Sequence[Gpu],
    *,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    available_bytes: int,
) -> Finding:
    """Checks that one worker's weights fit into memory, with room for the KV cache.

    Args:
        weight_bytes: bytes of all weights, in the data type used for computation.
        gpus: GPUs of this machine; if empty, `available_bytes` is the limit.
        tensor_parallel_size: number of ranks over which the weights are sharded.
        gpu_memory_utilization: fraction of a GPU's memory that a rank may use.
        available_bytes: available memory of the machine.
    """
    share = weight_bytes / tensor_parallel_size
    if not gpus:
        text = (
            f"weights need {weight_bytes / GIB:.2g} GiB of {available_bytes / GIB:.1f} GiB free "
            "memory"
        )
        if weight_bytes >= available_bytes:
            return Finding("bad", f"{text}: free memory, or use a smaller model")
        return Finding("ok", text)
    if len(gpus) < tensor_parallel_size:
        return Finding(
            "bad",
            f"--tensor-parallel-size {tensor_parallel_size} needs as many GPUs, but this machine "
            f"has {len(gpus)}: lower it, or use GPUs of several nodes with "
            "--tensor-parallel-placement pack",
        )
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    room = smallest.memory_bytes * gpu_memory_utilization
    text = (
        f"weights need {share / GIB:.1f} GiB per GPU; "
        f"{gpu_memory_utilization:.0%} of {smallest.name} is {room / GIB:.1f} GiB"
    )
    if share < room:
        return Finding(
            "ok", f"{text}, which leaves {(room - share) / GIB:.1f} GiB for the KV cache"
        )
    ranks = tensor_parallel_size
    while weight_bytes / ranks >= room:
        ranks *= 2
    return Finding("bad", f"{text}: use --tensor-parallel-size {ranks} or more, or a smaller model")


def check_shared_memory(total_bytes: int, num_gpus: int) -> Finding:
    """Checks that /dev/shm has room for Ray's object store and NCCL's buffers."""
    text = f"/dev/shm has {total_bytes / GIB:.2g} GiB"
    if total_bytes >= SHARED_MEMORY_GIB * GIB:
        return Finding("ok", text)
    return Finding(
        "bad" if num_gpus > 1 else "note",  # NCCL fails without; Ray falls back to /tmp
        f"{text}, less than the {SHARED_MEMORY_GIB} GiB that Ray and NCCL need: use docker run "
        f"--shm-size={SHARED_MEMORY_GIB}g, or a larger emptyDir of medium Memory",
    )


def check_open_files(soft: int, hard: int) -> Finding:
    """Checks the limit on open files; Ray raises a low soft limit to the hard one."""
    limit = hard if soft < OPEN_FILES else soft
    if limit >= OPEN_FILES:
        return Finding("ok", f"ulimit -n is {soft} (hard limit {hard})")
    return Finding(
        "note",
        f"the hard limit of ulimit -n is {hard}, enough for about {hard // 2} concurrent clients: "
        "raise it to 65536 (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)",
    )


def check_disk(folder: str, *, free_bytes: int, total_bytes: int, needed_bytes: int = 0) -> Finding:
    """Checks that the disk of `folder` has room for `needed_bytes` and for Ray's objects."""
    text = f"{free_bytes / GIB:.1f} GiB of disk space available at {folder}"
    if free_bytes < needed_bytes:
        return Finding(
            "bad",
            f"{text}, but the model's download needs {needed_bytes / GIB:.1f} GiB: free some "
            "space, or set HF_HOME to a larger disk",
        )
    if free_bytes < (1 - MAX_DISK_USAGE) * total_bytes:
        return Finding(
            "bad",
            f"{text}, less than the {1 - MAX_DISK_USAGE:.0%} that Ray requires to store objects: "
            "free disk space",
        )
    return Finding("ok", text)


def check_hub(hub: str, problem: str | None) -> Finding:
    """Finding on whether the Hub at the URL `hub` is reachable; `problem` is the reason if not."""
    if problem is None:
        return Finding("ok", f"Hugging Face Hub is reachable at {hub}")
    return Finding(
        "note",
        f"Hugging Face Hub is not reachable at {hub} ({problem}): only local folders and cached "
        "models can be served. To download models, check HTTPS_PROXY and HF_ENDPOINT",
    )


def check_cluster(address: str, found: Mapping[str, str], ours: Mapping[str, str]) -> Finding:
    """Checks that `serve --address` can join a Ray cluster.

    Args:
        address: address of the cluster, as given by the user.
        found: versions of `ray` and `python` on the cluster, or an error message as `problem`.
        ours: versions of `ray` and `python` in this environment.
    """
    if "problem" in found:
        return Finding("bad", f"cannot connect to a Ray cluster at {address}: {found['problem']}")
    differing = [
        f"{name} {found[name]} instead of {ours[name]}"
        for name in ("ray", "python")
        if found[name] != ours[name]
    ]
    if differing:
        return Finding(
            "bad",
            f"the Ray cluster at {address} has {', '.join(differing)}: versions must be equal, so "
            "use the cluster's image or environment",
        )
    return Finding("ok", f"Ray cluster at {address} (Ray {found['ray']}, Python {found['python']})")
