"""Memory planning of a rank: the number of KV pages on the device and in host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import psutil
import torch

from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.kv_cache import KVCacheLayout
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.protocol.page_groups import PageGroups
from worker.rank.diffusion.canvas import signal_bytes
from worker.rank.host_memory import count_gpus, default_host_bytes, tightest_bound
from worker.rank.sampling.logits_processors import table_bytes

logger = logging.getLogger(__name__)

_CPU_SHARE = 0.1
"""Default fraction of the machine's available memory for caches (total for all ranks)."""
_CPU_MOST_BYTES = 4 << 30
_STEADY_S, _AWAIT_S = 3.0, 60.0
"""Seconds without growth of free memory after which the memory in use is attributed to other
processes, and maximum seconds to wait in total. The driver frees a killed process's memory in
parts, within a second or two."""
_POLL_S = 0.1
_NOISE_BYTES = 16 << 20
"""Growth of free memory that is ignored; an exiting rank frees more."""


def await_free_memory(
    device: torch.device,
    utilization: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits while the driver frees a CUDA device's memory after a process has exited.

    Without this, a group that replaces a failed one would find little free memory and have a small
    cache for its lifetime. Returns immediately if this rank's share is free, otherwise when free
    memory has not grown for some seconds: the rest is used by other processes. Does nothing on CPU.

    Args:
        device: this rank's device.
        utilization: fraction of its memory that the rank may use.
        clock: returns seconds.
        sleep: sleeps for a number of seconds.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    needed = utilization * total
    if free >= needed:
        return
    logger.info(
        "waiting for memory of exited processes: %.1f of %.1f GB of %s free",
        *(free / 1e9, total / 1e9, device),
    )
    most, began = free, clock()
    changed = began
    while most < needed and clock() < min(changed + _STEADY_S, began + _AWAIT_S):
        sleep(_POLL_S)
        free, _ = torch.cuda.mem_get_info(device)
        if free > most + _NOISE_BYTES:
            most, changed = free, clock()
    logger.info(
        "waited %.1f s for GPU memory: %.1f GB free, %.1f GB needed",
        *(clock() - began, most / 1e9, needed / 1e9),
    )


def plan_pages(
    config: EngineConfig,
    *,
    group: TensorParallelGroup,
    page_bytes: int,
    page_groups: PageGroups,
    max_model_len: int,
    profile: Callable[[], None],
    graphs: Callable[[], int],
    state_bytes: int = 0,
) -> int:
    """Number of KV pages for one rank, including the dummy page.

    Args:
        config: the engine's configuration.
        group: the rank's tensor-parallel group.
        page_bytes: bytes of one page, including its share of state snapshots.
        page_groups: groups of layers with separate pages.
        max_model_len: maximum number of tokens of a request.
        profile: on CUDA, runs the largest step once to measure peak activation memory; also
            allocates the states.
        graphs: on CUDA, returns the bytes that CUDA graphs will take, and frees the allocations of
            `profile`.
        state_bytes: bytes of all slots' states and of the logits processors' tables, which are
            subtracted on CPU; on CUDA, `profile` allocates them.

    Raises:
        ValueError: not even one page per group fits.
    """
    cache = config.cache
    if cache.kv_cache_tokens is not None:
        return -(-cache.kv_cache_tokens // cache.page_size) * page_groups.num_groups + 1
    if group.device.type == "cuda":
        available = _cuda_cache_bytes(config, group, profile, graphs)
    else:
        share = int(_available_cpu_bytes() * _CPU_SHARE)
        available = min(share // config.tensor_parallel_size, _CPU_MOST_BYTES) - state_bytes
    pages = available // page_bytes
    if group.device.type == "cpu" or not cache.enable_prefix_caching:
        # Capped at what all slots use at full length. With prefix caching on a GPU, whose memory
        # has no other use, there is no cap: the rest caches prefixes.
        useful = config.scheduling.max_num_seqs * page_groups.num_pages(
            max_model_len, cache.page_size, config.scheduling.max_num_batched_tokens
        )
        pages = min(useful + 1, pages)
    if pages <= page_groups.num_groups:
        raise ValueError(
            f"no room for a KV cache: {max(0, available) / 1e6:.0f} MB available, but one page "
            f"needs {page_groups.num_groups * page_bytes / 1e6:.1f} MB. Raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or set "
            "--kv-cache-tokens"
        )
    return pages


def slot_bytes(
    config: EngineConfig,
    model: ModelConfig,
    layout: KVCacheLayout,
    dtype: torch.dtype,
    *,
    num_replayed: int,
    adapter_bytes: int,
) -> int:
    """Bytes that a rank allocates for all slots and for LoRA adapters: states (including the inputs
    of tokens to replay), self-conditioning signals of canvases, and logits processors' tables.

    Args:
        config: the engine's configuration.
        model: the model's configuration.
        layout: states and caches of the model's layers.
        dtype: type of hidden states.
        num_replayed: maximum number of tokens that are replayed into a state.
        adapter_bytes: size of the device's slots for LoRA adapters.
    """
    num_rows = config.scheduling.max_num_seqs + 1
    own = layout.slot_bytes(num_replayed) + signal_bytes(model, dtype)
    return own * num_rows + table_bytes(num_rows, model.vocab_size) + adapter_bytes


def plan_host_pages(
    config: EngineConfig, *, group: TensorParallelGroup, page_bytes: int, num_pages: int
) -> int:
    """Number of pages of one rank's host-memory tier; 0 if there is none.

    A draft model's part of a page is not offloaded. On CPU, it is recomputed for each request that
    enters a slot, even if its prefix is cached. On CUDA, pages that are copied back do not have it.

    Args:
        config: the engine's configuration.
        group: the rank's tensor-parallel group.
        page_bytes: bytes of one page, including its share of state snapshots.
        num_pages: number of pages on the device.

    Raises:
        ValueError: the machine has less memory than configured, or not even one page fits.
    """
    if config.cache.host_cache_gib is None:
        return _default_host_pages(config, group, page_bytes, num_pages)
    if not config.cache.host_cache_gib:
        return 0
    num_bytes = int(config.cache.host_cache_gib * 2**30)
    most = psutil.virtual_memory().total
    if num_bytes >= most:
        raise ValueError(
            f"--host-cache-gib {config.cache.host_cache_gib:g} exceeds this machine's memory "
            f"({most / 2**30:.1f} GiB): lower it"
        )
    num_host_pages = num_bytes // config.tensor_parallel_size // page_bytes
    if not num_host_pages:
        least = page_bytes * config.tensor_parallel_size / 2**30
        raise ValueError(
            f"--host-cache-gib {config.cache.host_cache_gib:g} is smaller than one page: "
            f"use at least {least:.4f}"
        )
    return num_host_pages


def _default_host_pages(
    config: EngineConfig, group: TensorParallelGroup, page_bytes: int, num_pages: int
) -> int:
    """Number of pages of the tier if its size is not configured: 0 without prefix caching, and 0 on
    CPU or if CPU and GPU share their memory, since the KV cache is then in host memory."""
    device = group.device
    if device.type != "cuda" or not config.cache.enable_prefix_caching:
        return 0
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", 0):
        return 0
    bound = tightest_bound()
    num_ranks = max(count_gpus(), torch.cuda.device_count())
    num_bytes = default_host_bytes(bound, num_ranks, num_pages * page_bytes)
    if group.rank == 0:
        logger.info(
            "KV offloading: %.1f GiB of host memory per rank (%.1f of %.1f GiB of %s free, half of "
            "the total is reserved, %d GPUs share the rest); set --host-cache-gib to change it",
            *(num_bytes / 2**30, bound.free / 2**30, bound.total / 2**30, bound.source, num_ranks),
        )
    return num_bytes // page_bytes


def _cuda_cache_bytes(
    config: EngineConfig,
    group: TensorParallelGroup,
    profile: Callable[[], None],
    graphs: Callable[[], int],
) -> int:
    device = group.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    graph_bytes = graphs()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # This is also a barrier for ranks on one device: after it, all have freed the memory of the
    # profiled step.
    ranks = group.gather_on_device([peak + graph_bytes, torch.cuda.memory_reserved(device)])
    free, total = torch.cuda.mem_get_info(device)
    share = cache_share(total, free, config.cache.gpu_memory_utilization, ranks)
    logger.info(
        "memory: %.1f GB total, %.1f GB free, %.1f GB peak per step, %.1f GB for CUDA graphs, "
        "%.1f GB for the KV cache",
        *(value / 1e9 for value in (total, free, peak, graph_bytes, share)),
    )
    return share


def cache_share(total: int, free: int, utilization: float, ranks: Sequence[Sequence[int]]) -> int:
    """Bytes for the KV cache of each rank on one device.

    Args:
        total: bytes of the device.
        free: bytes of the device that are free between steps.
        utilization: fraction of `total` that may be in use.
        ranks: for each rank, bytes used by a step at its peak and by graphs, and bytes held between
            steps.
    """
    held = sum(held for _, held in ranks)
    # Memory that is neither free nor used by the ranks' tensors: CUDA contexts, libraries, other
    # processes.
    foreign = total - free - held
    peaks = sum(peak for peak, _ in ranks)
    return (int(total * utilization) - foreign - peaks) // len(ranks)


def _available_cpu_bytes() -> int:
    return int(psutil.virtual_memory().available)
