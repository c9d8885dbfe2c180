"""The type of weights, activations and KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kernels.native import NativeUnavailable, bf16_speedup, has_bf16_products
from kernels.native.precision import Multiplier
from worker.config import CPUBackend, EngineConfig
from worker.models.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on GPUs multiply bfloat16, and kernels are compiled."""
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(
    config: EngineConfig, stored: str | None, group: TensorParallelGroup
) -> torch.dtype:
    """The type to compute in, the same on all ranks.

    `auto` on CUDA is bfloat16 or float16 as the checkpoint is stored, bfloat16 for all else, and
    float16 where the device has no bfloat16. On CPU it is bfloat16 for a checkpoint that is stored
    so, where that is quicker on all ranks' processors, and else float32: always in batch-invariant
    mode, since no output may depend on a measurement then.

    Args:
        config: of the engine.
        stored: the type that the checkpoint's config.json names, if it does.
        group: of the ranks; all have to call, since CPUs of several nodes may differ.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if group.device.type == "cuda":
        wanted = stored if stored in ("bfloat16", "float16") else "bfloat16"
        if wanted == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            wanted = "float16"
        return _DTYPES[wanted]
    if stored != "bfloat16" or config.batch_invariant:
        return torch.float32
    is_quick, why = prefers_bf16(config.cpu_steps)
    votes = group.all_reduce(torch.tensor([float(is_quick)]))
    if is_quick and int(votes) < group.world_size:
        is_quick, why = False, "another rank's processor is not quicker with bfloat16"
    if group.rank == 0:
        logger.info("--dtype auto takes %s: %s", "bfloat16" if is_quick else "float32", why)
    return torch.bfloat16 if is_quick else torch.float32


def prefers_bf16(backend: CPUBackend) -> tuple[bool, str]:
    """Whether CPU steps with `backend` are quicker in bfloat16 than in float32, and why."""
    if not has_bf16_products():
        return False, "this processor has no products of bfloat16 (AMX, AVX512_BF16)"
    speedups = {who: _speedup(who) for who in _multipliers(backend)}
    told = ", ".join(f"{speedup:.2g} times as quick by {who}" for who, speedup in speedups.items())
    return min(speedups.values()) > 1.0, f"products of bfloat16 are {told} as those of float32"


def _multipliers(backend: CPUBackend) -> Sequence[Multiplier]:
    """Multipliers that may come to compute; with auto that depends on the model, and both have to
    be quicker."""
    return ("native", "torch") if backend == "auto" else (backend,)


def _speedup(multiplier: Multiplier) -> float:
    try:
        return bf16_speedup(multiplier)
    except NativeUnavailable:  # torch takes its place
        return bf16_speedup("torch")
