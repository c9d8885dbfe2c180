"""Settings of a rank's process on CPU: threads, allocator and memory."""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys

import torch

from worker.config import EngineConfig
from worker.memory import keep_freed_memory
from worker.models.loading.native import NativeOptions

logger = logging.getLogger(__name__)

_KEEP_BYTES = 1 << 30


def tune_cpu_process(num_threads: int, world_size: int) -> None:
    """Configures torch in a rank's process; if `num_threads` is 0, ranks share all cores but one.

    The scheduler and the frontend use that core: a compute thread that waits for a core delays the
    whole step.
    """
    torch.set_num_threads(num_threads or max(1, (available_cores() - 1) // world_size))
    _keep_freed_memory()


def native_options(
    config: EngineConfig, device: torch.device, world_size: int
) -> NativeOptions | None:
    """A rank's options for the compiled CPU library; None if the rank does not use the library.

    By default, ranks share all cores: the library uses fewer threads for short steps anyway.
    """
    if device.type != "cpu" or config.cpu_steps == "torch":
        return None
    return NativeOptions(
        page_size=config.cache.page_size,
        num_threads=config.execution.cpu_threads or max(1, available_cores() // world_size),
        required=config.execution.cpu_backend == "native",
        weight_cache=config.execution.enable_weight_caching and config.load_format != "dummy",
    )


def available_cores() -> int:
    """Number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)


def lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor of zeros for a cache. On CPU (also if `device` is None), physical memory is only
    allocated for pages that are written, so a large unused cache is free."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_values = math.prod(shape)
    region = mmap.mmap(-1, num_values * dtype.itemsize)
    return torch.frombuffer(region, dtype=dtype, count=num_values).view(shape)


def _keep_freed_memory() -> None:
    """Makes malloc keep large freed blocks, since every step allocates them again.

    By default, glibc returns them to the kernel; the resulting page faults took half the time of a
    32-row step.
    """
    if not keep_freed_memory(_KEEP_BYTES) and sys.platform.startswith("linux"):
        logger.warning(
            "malloc does not support keeping freed memory; steps will be slower: use glibc"
        )
