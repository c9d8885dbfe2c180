"""One rank's KV cache: how large a page is, the memory of all pages, and what windows rule out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from worker.config import EngineConfig
from worker.models.context import KVCache
from worker.models.kv_cache import KVCacheLayout, KVCacheSpec
from worker.rank.cpu import lazy_zeros
from worker.wire.page_groups import PageGroups


def check_windows(config: EngineConfig, layout: KVCacheLayout) -> None:
    """Checks that the engine's configuration suits layers that see a window, or keep unlike things
    of a token, before weights are read.

    Raises:
        ValueError: it does not; the message says what to change.
    """
    windows = [group.window for group in layout.groups if group.window]
    if not windows and len(layout.groups) == 1:
        return
    what, remedy = "layers of this model keep unlike things of a token", "leave it out"
    if windows:
        what = f"layers of this model see {min(windows)} at a time"
        remedy = f"{remedy}, or set --max-model-len {min(windows)}"
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
            raise ValueError(f"{option} {reason}, {what}: {remedy}")


def page_groups(config: EngineConfig, layout: KVCacheLayout) -> PageGroups:
    """The page groups of the layout, as the scheduler has to know them."""
    num_pages = layout.snapshot_pages(config.page_size) if config.enable_prefix_caching else 0
    return msgspec.structs.replace(layout.page_groups, snapshot_pages=num_pages)


def page_bytes(
    config: EngineConfig, layout: KVCacheLayout, groups: PageGroups, draft_bytes: int = 0
) -> int:
    """Bytes that a page takes on this rank, its share of snapshots and `draft_bytes`, what it takes
    in a draft model's cache, included."""
    num_bytes = layout.page_bytes(config.page_size) + draft_bytes
    if groups.snapshot_pages:
        num_bytes += -(-layout.state_bytes // groups.snapshot_pages)
    return num_bytes


def allocate_kv_caches(
    num_pages: int, page_size: int, layout: KVCacheLayout, device: torch.device
) -> Mapping[int, KVCache]:
    """KV caches by layer that has pages; zeros, since attention reads unused slots of a page (and
    masks them). Layers of different groups have one tensor where they stand at the same place.

    A layer that shares pages with others of its group has a view that begins where its first page
    does: `layers_per_page` times the number of a page is that of its own.
    """
    spec = layout.spec
    shape = (num_pages, *spec.page_shape(page_size))
    tensors = [
        [lazy_zeros(shape, spec.dtype, device) for _ in range(spec.num_planes)]
        for _ in range(layout.group_size)
    ]
    by_layer: dict[int, KVCache] = {}
    for group in layout.groups:
        for place, layer in enumerate(group.layers):
            number, first = divmod(place, group.layers_per_page)
            own_shape = group.spec.page_shape(page_size)
            planes = [plane.view(-1, *own_shape)[first:] for plane in tensors[number]]
            by_layer[layer] = _make_cache(planes, group.spec)
    return {layer: by_layer[layer] for layer in sorted(by_layer)}


def _make_cache(planes: Sequence[torch.Tensor], spec: KVCacheSpec) -> KVCache:
    values = planes[0][..., : spec.value_dim] if spec.value_dim else planes[1]
    return KVCache(planes=tuple(planes), v=values)
