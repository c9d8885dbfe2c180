"""The settings of a process that computes on CPU: threads, allocator, memory."""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys
from pathlib import Path

import torch

from worker.config import EngineConfig
from worker.memory import keep_freed_memory
from worker.models.native import NativeOptions

logger = logging.getLogger(__name__)

_KEEP_BYTES = 1 << 30
_NICENESS = 10
"""Niceness of a rank. At 0, 5 and 10, two workers offered 1.3 times what they sustain on two cores,
gateway and clients beside them: urgent requests' median time to the first token was 68, 56 and 53
ms, and 2,850, 2,906 and 3,097 tokens per second came."""


_AUTOGROUP_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")
_OWN_AUTOGROUP = Path("/proc/self/autogroup")


def yield_cpu_to_others() -> None:
    """Lets all else on this machine that has something to do go first, now and then.

    Steps take all the time that cores have, whatever their priority. Gateways, fronts, schedulers
    and clients need little of it, but need it at once: where they share cores with steps of the
    same priority, each of their moves waits for several milliseconds.

    For a process that does nothing but steps; the threads that it starts later do as it does.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    _yield_cpu_to_other_sessions(niceness)


def _yield_cpu_to_other_sessions(niceness: int) -> None:
    """Makes that niceness count beyond this process's session, where Linux would not.

    With automatic task groups, its default outside of containers, cores are shared among sessions
    first, and niceness ranks the processes of one session alone. HAProxy, which Ray puts into a
    session of its own, was seen to wait for a core for up to three seconds beside two ranks that
    stepped all the time, and all streams with it.
    """
    try:
        if _AUTOGROUP_ENABLED.read_text().strip() == "1":
            if os.getsid(0) != os.getpid():
                os.setsid()
            _OWN_AUTOGROUP.write_text(str(niceness))
    except OSError as error:
        logger.info("sessions share cores evenly, whatever their niceness: %s", error)


def tune_cpu_process(num_threads: int, world_size: int) -> None:
    """Sets up the process of one rank for torch; 0 threads divides the cores but one.

    That one is for the scheduler and the frontend: a compute thread that must wait for a core holds
    up the whole step.
    """
    torch.set_num_threads(num_threads or max(1, (available_cores() - 1) // world_size))
    _keep_freed_memory()


def native_options(
    config: EngineConfig, device: torch.device, world_size: int
) -> NativeOptions | None:
    """How a rank uses the compiled library; None where it does not.

    By default all cores are divided: short steps take fewer threads anyway.
    """
    if device.type != "cpu" or config.cpu_steps == "torch":
        return None
    return NativeOptions(
        page_size=config.page_size,
        num_threads=config.cpu_threads or max(1, available_cores() // world_size),
        required=config.cpu_backend == "native",
        weight_cache=config.enable_weight_caching and config.load_format != "dummy",
    )


def available_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)


def lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Zeros of a cache; on CPU, unless another device is named, they take memory only where they
    are written, so that a large one costs nothing idle."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_values = math.prod(shape)
    region = mmap.mmap(-1, num_values * dtype.itemsize)
    return torch.frombuffer(region, dtype=dtype, count=num_values).view(shape)


def _keep_freed_memory() -> None:
    """Has malloc keep large freed blocks, which every step takes again.

    By default glibc gives them back, and faulting their pages in anew was measured at half the
    time of a 32-row step.
    """
    if not keep_freed_memory(_KEEP_BYTES) and sys.platform.startswith("linux"):
        logger.warning("malloc refuses to keep freed memory; steps will be slower")
