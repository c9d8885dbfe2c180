"""One rank's KV cache: how large a page is, the memory of all pages, and what windows rule out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from worker.config import EngineConfig
from worker.models.context import KVCache
from worker.models.kv_cache import KVCacheLayout, KVCacheSpec
from worker.rank.cpu import lazy_zeros
from worker.rank.speculation.draft_model import draft_page_bytes
from worker.wire.page_groups import PageGroups


def check_windows(config: EngineConfig, layout: KVCacheLayout) -> None:
    """Whether the engine's configuration suits layers that see a window, before weights are read.

    Raises:
        ValueError: it does not; the message says what to change.
    """
    windows = [group.window for group in layout.groups if group.window]
    if not windows:
        return
    window = min(windows)
    refused = {
        "--host-cache-gib": ("keeps prefixes whole", config.host_cache_gib > 0.0),
        "--speculative-method draft": (
            "takes pages of all positions",
            config.speculative_method == "draft",
        ),
        "--cpu-backend native": ("attends to all positions", config.cpu_backend == "native"),
    }
    for option, (reason, is_set) in refused.items():
        if is_set:
            raise ValueError(
                f"{option} {reason}, layers of this model see {window} at a time: leave it out, or "
                f"set --max-model-len {window}"
            )


def page_groups(config: EngineConfig, layout: KVCacheLayout) -> PageGroups:
    """What the scheduler has to know of the layout."""
    num_pages = layout.snapshot_pages(config.page_size) if config.enable_prefix_caching else 0
    return msgspec.structs.replace(layout.page_groups, snapshot_pages=num_pages)


def page_bytes(config: EngineConfig, layout: KVCacheLayout, groups: PageGroups) -> int:
    """Bytes that a page takes on this rank, its share of snapshots and what it takes in a draft
    model's cache included."""
    num_bytes = layout.page_bytes(config.page_size) + draft_page_bytes(config)
    if groups.snapshot_pages:
        num_bytes += -(-layout.state_bytes // groups.snapshot_pages)
    return num_bytes


def allocate_kv_caches(
    num_pages: int, page_size: int, layout: KVCacheLayout, device: torch.device
) -> Mapping[int, KVCache]:
    """By layer that has pages, its cache; zeros, since attention reads unused slots of a page (and
    masks them). Layers of different groups have one tensor where they stand at the same place."""
    spec = layout.spec
    shape = (num_pages, *spec.page_shape(page_size))
    caches = [
        _make_cache([_zeros(shape, spec.dtype, device) for _ in range(spec.num_planes)], spec)
        for _ in range(layout.group_size)
    ]
    by_layer = {
        layer: cache
        for group in layout.groups
        for layer, cache in zip(group.layers, caches, strict=False)
    }
    return {layer: by_layer[layer] for layer in sorted(by_layer)}


def _make_cache(planes: Sequence[torch.Tensor], spec: KVCacheSpec) -> KVCache:
    values = planes[0][..., : spec.value_dim] if spec.value_dim else planes[1]
    return KVCache(planes=tuple(planes), v=values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return lazy_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
