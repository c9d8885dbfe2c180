"""Which device and which type one rank computes in."""

from __future__ import annotations

import torch

from worker.config import EngineConfig

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The type of weights, activations and KV cache."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[config.dtype]


def select_device(config: EngineConfig, rank: int) -> torch.device:
    """This rank's device, which becomes the calling thread's current one.

    Raises:
        ValueError: CUDA was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("--device cuda: no CUDA device is visible; use --device cpu")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    # Triton launches on the current device, and pinning memory makes a context there.
    torch.cuda.set_device(device)
    return device
