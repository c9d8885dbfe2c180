"""Checks of `rayfleet doctor` on values that `cluster.cli.doctor` has read from the machine.

A finding is one line; where something is wrong it says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

GIB = 1 << 30
OLDEST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""Oldest NVIDIA driver by major version of CUDA, for all its minor versions (NVIDIA's "CUDA
Compatibility")."""
SHARED_MEMORY_GIB = 1
"""GiB of /dev/shm that are enough for Ray's object store and NCCL's buffers between the ranks of a
node; the Helm chart gives as much."""
OPEN_FILES = 4096
"""Limit of open files below which Ray warns. HAProxy keeps two per client, as does a gateway."""
MOST_DISK_USED = 0.95
"""Part of a disk beyond which Ray stores no object there (local_fs_capacity_threshold)."""


class Finding(NamedTuple):
    """One line of the report: whether a check passed, and its text."""

    verdict: Literal["ok", "note", "bad"]
    text: str


class Gpu(NamedTuple):
    """One GPU, as its driver describes it."""

    name: str
    memory_bytes: int
    capability: tuple[int, ...] = ()
    """Compute capability; empty where the driver does not tell."""


def check_requirements(
    requirements: Mapping[str, Sequence[str]], versions: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether each distribution's requirements are installed, in a version that it accepts.

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
            there = "it is not installed" if installed is None else f"{installed} is installed"
            yield Finding(
                "bad",
                f"{distribution} {versions.get(distribution, '')} needs {needed}, and {there}: "
                f"pip install '{needed}', or all of constraints.txt in a new environment",
            )
    if not broken:
        yield Finding("ok", f"{', '.join(requirements)}: all that they require is installed")


def check_gpu(index: int, gpu: Gpu) -> Finding:
    """Whether the kernels support a GPU's compute capability."""
    from worker.rank.dtype import LEAST_CAPABILITY

    text = f"GPU {index}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB"
    if gpu.capability and gpu.capability < LEAST_CAPABILITY:
        least, told = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, gpu.capability))
        return Finding("bad", f"{text}: compute capability {told}, and kernels need {least}")
    return Finding("ok", text)


def check_driver(built_for: str | None, driver: str | None) -> Finding:
    """Whether the NVIDIA driver is new enough for this build of torch.

    Args:
        built_for: version of CUDA that torch was built for; None for a CPU build.
        driver: version of the driver; None without one.
    """
    if built_for is None and driver is None:
        return Finding("note", "no NVIDIA driver, and torch is a CPU build: models run on the CPU")
    if built_for is None:
        return Finding(
            "note",
            f"there is an NVIDIA driver ({driver}), but torch is a CPU build and models run on the "
            "CPU: install torch from the public index for CUDA",
        )
    if driver is None:
        return Finding(
            "note",
            f"torch is built for CUDA {built_for}, but there is no NVIDIA driver: models run on "
            "the CPU (in a container: is it started with --gpus all?)",
        )
    oldest = OLDEST_DRIVERS.get(int(built_for.split(".")[0]))
    if oldest is None:
        return Finding("note", f"torch is built for CUDA {built_for}; the driver is {driver}")
    if Version(driver) < Version(oldest):
        return Finding(
            "bad",
            f"the NVIDIA driver is {driver}, and torch's CUDA {built_for} needs {oldest} or newer, "
            "else it sees no GPU: update the driver, or install torch for an older CUDA (README, "
            '"Five minutes")',
        )
    return Finding("ok", f"NVIDIA driver {driver}, which CUDA {built_for} runs on")


def check_weights(
    weight_bytes: int,
    gpus: Sequence[Gpu],
    *,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    available_bytes: int,
) -> Finding:
    """Whether one worker's weights fit, and what is left for KV cache and activations.

    Args:
        weight_bytes: bytes of all weights, in the data type that they are computed in.
        gpus: GPUs of this machine; without any, `available_bytes` is the limit.
        tensor_parallel_size: ranks that the weights are sharded over.
        gpu_memory_utilization: part of a GPU's memory that a rank may use.
        available_bytes: available memory of the machine.
    """
    share = weight_bytes / tensor_parallel_size
    if not gpus:
        text = f"weights take {weight_bytes / GIB:.2g} GiB of {available_bytes / GIB:.1f} available"
        if weight_bytes >= available_bytes:
            return Finding("bad", f"{text}: free memory, or take a smaller model")
        return Finding("ok", text)
    if len(gpus) < tensor_parallel_size:
        return Finding(
            "bad",
            f"a worker of {tensor_parallel_size} ranks needs as many GPUs, and {len(gpus)} are "
            "here: lower --tensor-parallel-size, or let --tensor-parallel-placement pack take "
            "those of several nodes",
        )
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    room = smallest.memory_bytes * gpu_memory_utilization
    text = (
        f"weights take {share / GIB:.1f} GiB of each GPU; "
        f"{gpu_memory_utilization:.0%} of {smallest.name} are {room / GIB:.1f} GiB"
    )
    if share < room:
        return Finding("ok", f"{text}, which leaves {(room - share) / GIB:.1f} for the KV cache")
    ranks = tensor_parallel_size
    while weight_bytes / ranks >= room:
        ranks *= 2
    return Finding("bad", f"{text}: --tensor-parallel-size {ranks} or more, or a smaller model")


def check_shared_memory(total_bytes: int, num_gpus: int) -> Finding:
    """Whether /dev/shm has room for Ray's object store and NCCL's buffers."""
    text = f"/dev/shm has {total_bytes / GIB:.2g} GiB"
    if total_bytes >= SHARED_MEMORY_GIB * GIB:
        return Finding("ok", text)
    return Finding(
        "bad" if num_gpus > 1 else "note",  # NCCL fails without; Ray falls back to /tmp
        f"{text}, less than the {SHARED_MEMORY_GIB} that Ray and NCCL want: docker run "
        f"--shm-size={SHARED_MEMORY_GIB}g, or a larger emptyDir of medium Memory",
    )


def check_open_files(soft: int, hard: int) -> Finding:
    """Whether processes may open enough files; Ray raises a low soft limit to the hard one."""
    limit = hard if soft < OPEN_FILES else soft
    if limit >= OPEN_FILES:
        return Finding("ok", f"ulimit -n is {soft} (at most {hard})")
    return Finding(
        "note",
        f"ulimit -n is at most {hard}, enough for some {hard // 2} clients at a time: raise the "
        "hard limit to 65536 (limits.conf, LimitNOFILE=, docker run --ulimit nofile=65536)",
    )


def check_disk(folder: str, *, free_bytes: int, total_bytes: int, needed_bytes: int = 0) -> Finding:
    """Whether the disk of `folder` has room for `needed_bytes` and for Ray's objects."""
    text = f"{free_bytes / GIB:.1f} GiB are free at {folder}"
    if free_bytes < needed_bytes:
        return Finding(
            "bad",
            f"{text}, and the model's download takes {needed_bytes / GIB:.1f}: free some, or set "
            "HF_HOME to a larger disk",
        )
    if free_bytes < (1 - MOST_DISK_USED) * total_bytes:
        return Finding(
            "bad",
            f"{text}, less than the {1 - MOST_DISK_USED:.0%} without which Ray stores nothing "
            "there: free some",
        )
    return Finding("ok", text)


def check_hub(hub: str, problem: str | None) -> Finding:
    """Whether the Hub at the URL `hub` answers; `problem` is the reason why not, or None."""
    if problem is None:
        return Finding("ok", f"the Hub answers at {hub}")
    return Finding(
        "note",
        f"the Hub does not answer at {hub} ({problem}): folders and models in its cache can be "
        "served; else check HTTPS_PROXY and HF_ENDPOINT",
    )


def check_cluster(address: str, found: Mapping[str, str], ours: Mapping[str, str]) -> Finding:
    """Whether `serve --address` can join a Ray cluster.

    Args:
        address: the cluster's address as it was given.
        found: the cluster's versions of `ray` and `python`, or the reason for none as `problem`.
        ours: versions of `ray` and `python` in this environment.
    """
    if "problem" in found:
        return Finding("bad", f"no Ray cluster at {address}: {found['problem']}")
    differing = [
        f"{name} {found[name]} there and {ours[name]} here"
        for name in ("ray", "python")
        if found[name] != ours[name]
    ]
    if differing:
        return Finding(
            "bad",
            f"the Ray cluster at {address} has {', '.join(differing)}: Ray joins only equal "
            "versions, so take the cluster's image or environment",
        )
    return Finding(
        "ok", f"a Ray cluster at {address} (Ray {found['ray']}, Python {found['python']})"
    )
