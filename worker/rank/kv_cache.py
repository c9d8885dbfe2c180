"""KV cache of one rank: the size of a page, and the memory of all pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from worker.config import EngineConfig
from worker.models.layers.context import KVCache
from worker.models.layers.kv_cache import KVCacheLayout, KVCacheSpec
from worker.protocol.page_groups import PageGroups
from worker.rank.cpu import lazy_zeros


def page_groups(config: EngineConfig, layout: KVCacheLayout) -> PageGroups:
    """The layout's page groups, for the scheduler."""
    cache = config.cache
    num_pages = layout.snapshot_pages(cache.page_size) if cache.enable_prefix_caching else 0
    return msgspec.structs.replace(layout.page_groups, snapshot_pages=num_pages)


def page_bytes(
    config: EngineConfig, layout: KVCacheLayout, groups: PageGroups, draft_bytes: int = 0
) -> int:
    """Size of one page on this rank, in bytes, including its share of state snapshots and the
    `draft_bytes` that it takes in a draft model's cache."""
    num_bytes = layout.page_bytes(config.cache.page_size) + draft_bytes
    if groups.snapshot_pages:
        num_bytes += -(-layout.state_bytes // groups.snapshot_pages)
    return num_bytes


def allocate_planes(
    num_pages: int, page_size: int, layout: KVCacheLayout, device: torch.device
) -> list[list[torch.Tensor]]:
    """Allocates the planes of all pages; returns them by tensor: first the layout's tensors, then
    those of `layout.beside`. A plane is [num_pages, tokens, heads, head_dim]. The index keys of a
    layer are the last plane of its tensor, [num_pages, tokens, 1, dim].

    Planes are zeros at first, since attention reads unused slots of a page and masks them.
    """
    specs = [layout.spec] * layout.group_size + [group.spec for group in layout.beside]
    tensors = [
        [
            lazy_zeros((num_pages, *shape), spec.dtype, device)
            for shape in spec.page_shapes(page_size)
        ]
        for spec in specs
    ]
    for layer, keys in layout.index_keys.items():
        number = layout.groups[0].layers.index(layer)
        plane = lazy_zeros((num_pages, page_size, 1, keys.dim), keys.dtype, device)
        tensors[number].append(plane)
    return tensors


def kv_caches(
    tensors: Sequence[Sequence[torch.Tensor]], page_size: int, layout: KVCacheLayout
) -> Mapping[int, KVCache]:
    """KV caches, by index of the layers that have pages, as views of the result of
    `allocate_planes`.

    Layers at the same index in different groups share one tensor; their groups own different pages
    of it. If a page contains several layers of a group (`layers_per_page`), each has a view that
    begins at its part of page 0; page `p` is then index `layers_per_page * p` of the view.
    """
    by_layer: dict[int, KVCache] = {}
    for group in layout.groups:
        for place, layer in enumerate(group.layers):
            number, first = divmod(place, group.layers_per_page)
            shapes = group.spec.page_shapes(page_size)
            planes = [
                plane.view(-1, *shape)[first:]
                for plane, shape in zip(tensors[number][: len(shapes)], shapes, strict=True)
            ]
            index_keys = tensors[number][len(shapes)] if layer in layout.index_keys else None
            by_layer[layer] = _make_cache(planes, group.spec, index_keys)
    for group, own in zip(layout.beside, tensors[layout.group_size :], strict=True):
        by_layer[group.layers[0]] = _make_cache(own, group.spec, None)
    return {layer: by_layer[layer] for layer in sorted(by_layer)}


def allocate_kv_caches(
    num_pages: int, page_size: int, layout: KVCacheLayout, device: torch.device
) -> Mapping[int, KVCache]:
    """KV caches in newly allocated memory, by index of the layers that have pages."""
    return kv_caches(allocate_planes(num_pages, page_size, layout, device), page_size, layout)


def _make_cache(
    planes: Sequence[torch.Tensor], spec: KVCacheSpec, index_keys: torch.Tensor | None
) -> KVCache:
    values = planes[0][..., : spec.value_dim] if spec.value_dim else planes[1]
    added = () if index_keys is None else (index_keys,)
    return KVCache(planes=(*planes, *added), v=values, index_keys=index_keys)
