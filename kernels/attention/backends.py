"""Attention by other libraries, chosen by name: what they offer and which are there."""

from __future__ import annotations

import importlib.util

import torch

from kernels.attention.base import AttentionBackend, AttentionBackendName
from kernels.registry import registry

_TYPES = (torch.float16, torch.bfloat16)


def create_attention_backend(
    backend: AttentionBackendName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    batch_invariant: bool,
) -> AttentionBackend | None:
    """The library for `prepare_decode` and `prepare_extend`; None for the ops of this package.

    Raises:
        ValueError: the backend cannot work here; the message says what would help.
    """
    option = f"--attention-backend {backend}"
    own_triton = registry.uses_triton(torch.empty(0, device=device))
    if backend == "auto" or (backend == "torch" and not own_triton):
        return None
    if batch_invariant and backend != "triton":
        raise ValueError(f"{option} is not batch-invariant; use auto or triton")
    if backend == "triton":
        if not own_triton:
            raise ValueError(f"{option} needs a CUDA device; use auto or torch")
        return None
    if backend == "torch":
        from kernels.attention.torch_backend import TorchAttention

        return TorchAttention()
    if device.type != "cuda":
        raise ValueError(f"{option} needs a CUDA device; use auto or torch")
    if dtype not in _TYPES:
        raise ValueError(f"{option} takes float16 and bfloat16, not {dtype}; use auto, or --dtype")
    return import_library(backend, device, page_size)


def import_library(
    backend: AttentionBackendName, device: torch.device, page_size: int
) -> AttentionBackend:
    """FlashInfer or FlashAttention. Raises ValueError where it is not installed."""
    option = f"--attention-backend {backend}"
    if backend == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            raise ValueError(f"{option}: run `pip install flashinfer-python`, or use auto")
        from kernels.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(importlib.import_module("flashinfer"), device)
    from kernels.attention.flash_attn import find_flash_attention

    found = find_flash_attention(page_size)
    if found is None:
        raise ValueError(
            f"{option}: run `pip install flash-attn` (and set --page-size 256), install "
            "flash_attn_interface (FlashAttention 3), or use auto"
        )
    return found
