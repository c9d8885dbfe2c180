"""Data types of weights, activations and KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kernels.native import NativeUnavailable, bf16_speedup, has_bf16_products
from kernels.native.precision import Multiplier
from worker.config import CPUBackend, EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability for bfloat16 matmuls."""
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for conversions from and to FP8 (e4m3)."""
_WITHOUT_FP8 = ("flash",)
"""Attention backends that do not support FP8 caches."""
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(
    config: EngineConfig, stored: str | None, group: TensorParallelGroup
) -> torch.dtype:
    """The data type used for computation, the same on all ranks.

    On CUDA, `auto` selects the checkpoint's type if that is bfloat16 or float16, otherwise
    bfloat16; devices without bfloat16 use float16 instead. On CPU, it selects bfloat16 if the
    checkpoint is stored in bfloat16 and that is faster on all ranks' CPUs, otherwise float32. In
    batch-invariant mode on CPU, it always selects float32, since outputs must not depend on a
    measurement.

    Args:
        config: the engine's configuration.
        stored: data type in the checkpoint's config.json, if any.
        group: the ranks, all of which must call this, since CPUs of several nodes may differ.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if group.device.type == "cuda":
        name = stored if stored in ("bfloat16", "float16") else "bfloat16"
        if name == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = "float16"
        return _DTYPES[name]
    if stored != "bfloat16" or config.batch_invariant:
        return torch.float32
    is_quick, why = prefers_bf16(config.cpu_steps)
    votes = group.all_reduce(torch.tensor([float(is_quick)]))
    if is_quick and int(votes) < group.world_size:
        is_quick, why = False, "bfloat16 is not faster on another rank's processor"
    if group.rank == 0:
        logger.info("--dtype auto: using %s, since %s", "bfloat16" if is_quick else "float32", why)
    return torch.bfloat16 if is_quick else torch.float32


def resolve_cache_dtype(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> torch.dtype | None:
    """The data type of the KV cache: FP8, or None for the type used for computation.

    `auto` selects FP8 if the checkpoint specifies it and the device and the attention backend
    support it. On CPU, where FP8 is slower, it never does.

    Args:
        config: the engine's configuration.
        model: the model's configuration.
        device: the rank's device.
        dtype: the data type to compute in.

    Raises:
        ValueError: FP8 is configured but the GPU does not support it, or bfloat16 is configured but
            the model computes in another data type.
    """
    if config.cache.kv_cache_dtype == "bfloat16":
        if dtype != torch.bfloat16:
            raise ValueError(
                f"--kv-cache-dtype bfloat16 needs --dtype bfloat16, but this model uses "
                f"{str(dtype).removeprefix('torch.')}: use auto"
            )
        return None
    is_auto, capability = config.cache.kv_cache_dtype == "auto", FP8_CAPABILITY
    if is_auto:
        is_specified = model.quantization is not None and model.quantization.has_fp8_cache
        is_other = device.type != "cuda" or config.execution.attention_backend in _WITHOUT_FP8
        if is_other or not is_specified:
            return None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        if is_auto:
            return None
        needed, found = (".".join(map(str, pair)) for pair in (FP8_CAPABILITY, capability))
        raise ValueError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype} needs a GPU with compute capability "
            f"{needed} "
            f"or higher (L4, L40S, H100 or later), but this GPU has {found}: use auto"
        )
    return torch.float8_e4m3fn


def prefers_bf16(backend: CPUBackend) -> tuple[bool, str]:
    """Whether CPU steps with `backend` are faster in bfloat16 than in float32; also returns the
    reason."""
    if not has_bf16_products():
        return False, "this processor has no bfloat16 instructions (AMX, AVX512_BF16)"
    speedups = {who: _speedup(who) for who in _multipliers(backend)}
    measured = ", ".join(f"{speedup:.2g}x ({who})" for who, speedup in speedups.items())
    return min(speedups.values()) > 1.0, f"bfloat16 matmuls run at {measured} of float32's speed"


def _multipliers(backend: CPUBackend) -> Sequence[Multiplier]:
    """Matmul implementations that must be faster in bfloat16 for it to be selected; with the
    backend `auto`, both, since the model determines which one is used."""
    return ("native", "torch") if backend == "auto" else (backend,)


def _speedup(multiplier: Multiplier) -> float:
    try:
        return bf16_speedup(multiplier)
    except NativeUnavailable:  # torch is used instead
        return bf16_speedup("torch")
