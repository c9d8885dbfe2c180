"""One rank's KV cache: how large a page is, and the memory of all pages."""

from __future__ import annotations

import torch

from worker.config import EngineConfig
from worker.models.config import ModelConfig
from worker.models.context import KVCache
from worker.models.layers import local_heads
from worker.models.tensor_parallel import TensorParallelGroup
from worker.rank.cpu import lazy_zeros
from worker.rank.speculation.draft_model import draft_page_bytes


def page_bytes(
    config: EngineConfig, model: ModelConfig, group: TensorParallelGroup, dtype: torch.dtype
) -> int:
    """Bytes that a page takes on this rank, in a draft model's cache included."""
    return own_page_bytes(config, model, group, dtype) + draft_page_bytes(config)


def own_page_bytes(
    config: EngineConfig, model: ModelConfig, group: TensorParallelGroup, dtype: torch.dtype
) -> int:
    """Bytes that a page takes on this rank in the cache of the model itself."""
    _, num_kv_heads = local_heads(model, group.world_size)
    values = num_kv_heads * model.head_dim * config.page_size
    return 2 * model.num_layers * values * dtype.itemsize


def allocate_kv_caches(
    num_pages: int,
    page_size: int,
    model: ModelConfig,
    group: TensorParallelGroup,
    dtype: torch.dtype,
) -> tuple[KVCache, ...]:
    """The cache of each layer; zeros, since attention reads unused slots of a page (and masks
    them)."""
    _, num_kv_heads = local_heads(model, group.world_size)
    shape = (num_pages, page_size, num_kv_heads, model.head_dim)
    return tuple(
        KVCache(k=_zeros(shape, dtype, group.device), v=_zeros(shape, dtype, group.device))
        for _ in range(model.num_layers)
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return lazy_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
