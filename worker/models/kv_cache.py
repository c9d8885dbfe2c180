"""The layout of the KV cache: what the layers of a model keep of every token, and how they share
the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from worker.wire.page_groups import PageGroups

_MOST_PADDING = 1.25
"""Groups are as large as the largest kind of layers where that is no more than so many times the
smallest: a few layers' memory is left unused, but requests have few page tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """KV cache of one layer on one rank, per token. A layer that keeps nothing has none."""

    num_kv_heads: int
    """KV heads on this rank."""
    head_dim: int
    dtype: torch.dtype
    window: int = 0
    """Positions that a query sees, its own included; 0 for all before it. What lies before the
    window of all queries to come is not kept."""
    is_chunked: bool = False
    """Whether windows begin at multiples of their length: a query sees its chunk up to itself. Kept
    is what a window of that length has."""
    value_dim: int = 0
    """Leading dimensions of the keys that are the values; 0 where values are kept besides."""

    @property
    def num_planes(self) -> int:
        """Tensors: keys and values are two, what both are computed from is one."""
        return 1 if self.value_dim else 2

    def page_bytes(self, page_size: int) -> int:
        """Number of tensors: keys and values are two, what both are computed from is one."""
        values = self.num_kv_heads * self.head_dim * page_size
        return self.num_planes * values * self.dtype.itemsize

    def page_shape(self, page_size: int) -> tuple[int, int, int]:
        """Shape of one plane of a page: [tokens, heads, head_dim]."""
        return page_size, self.num_kv_heads, self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """State of one layer on one rank, per request: in place of its tokens, however many."""

    conv_shape: tuple[int, int]
    """Shape of the last inputs of a convolution: [positions, channels]."""
    recurrent_shape: tuple[int, int, int]
    """Shape of the recurrent state, fp32: [heads, key dim, value dim]."""
    dtype: torch.dtype
    """Type of the convolution's inputs."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of one request."""
        return prod(self.conv_shape) * self.dtype.itemsize + prod(self.recurrent_shape) * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheGroup:
    """Layers whose keys and values lie on the same pages, the first of a group beside the first of
    each other one: in the same tensor, on other pages.

    Where some layers keep less of a token than others, several of them share a tensor:

        tensor i   page 0                page 1
        a group    layer i               layer i
        another    layer 2i, layer 2i+1  layer 2i, layer 2i+1      layers_per_page 2
    """

    layers: tuple[int, ...]
    """Their numbers, ascending."""
    spec: KVCacheSpec
    """Specification of each of its layers."""
    layers_per_page: int = 1
    """Layers whose pages lie side by side in a page of one tensor."""

    @property
    def window(self) -> int:
        """Positions that a query of its layers sees, its own included; 0 for all before it."""
        return self.spec.window

    @property
    def num_tensors(self) -> int:
        """Tensors, of each plane, that its layers need."""
        return -(-len(self.layers) // self.layers_per_page)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheLayout:
    """How the layers of a model are grouped: those with equal specs, in groups whose pages are
    equally large."""

    groups: tuple[KVCacheGroup, ...]
    """Groups of layers, those without a window first."""
    spec: KVCacheSpec
    """Specification of the layer that keeps most."""
    states: Mapping[int, StateSpec] = field(default_factory=dict)
    """States of layers that are in no group, by their numbers."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one request in all layers that keep a state."""
        return sum(spec.num_bytes for spec in self.states.values())

    def snapshot_pages(self, page_size: int) -> int:
        """Pages that take as much memory as a request's state; 0 where no layer keeps one."""
        return -(-self.state_bytes // self.page_bytes(page_size))

    @property
    def group_size(self) -> int:
        """Tensors of a plane: layers of a group that keep most, at most."""
        return max(group.num_tensors for group in self.groups)

    @property
    def page_groups(self) -> PageGroups:
        """The page groups of the layout, as the scheduler has to know them."""
        windows = [group.window for group in self.groups if group.window]
        return PageGroups(
            num_full=len(self.groups) - len(windows),
            num_window=len(windows),
            window=max(windows, default=0),
        )

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page in all layers of a group."""
        return self.group_size * self.spec.page_bytes(page_size)


def group_layers(specs: Sequence[KVCacheSpec | StateSpec]) -> KVCacheLayout:
    """Groups the layers of a model by their specs; those that keep a state have no pages.

    Where kinds of layers are not equally many, a kind is several groups, and the last of these may
    have fewer layers: a page is as large as that of a whole group.

    Raises:
        ValueError: layers keep unlike things of a token, so that pages of some are no part of those
            of others, or states beside windows, or nothing but states.
    """
    states = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, StateSpec)}
    paged = [(layer, spec) for layer, spec in enumerate(specs) if isinstance(spec, KVCacheSpec)]
    if states and (not paged or any(spec.window for _, spec in paged)):
        raise ValueError("layers that keep a state need others beside them that see all positions")
    most_layer, most = max(paged, key=lambda entry: entry[1].page_bytes(1))
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in paged:
        is_like = (spec.dtype, spec.num_planes) == (most.dtype, most.num_planes)
        if not is_like or most.page_bytes(1) % spec.page_bytes(1):
            raise ValueError(
                f"layer {layer} keeps {spec} of a token, layer {most_layer} {most}: their pages "
                "have to be equally large, or the one's a whole part of the other's"
            )
        kinds.setdefault(spec, []).append(layer)
    shares = {spec: most.page_bytes(1) // spec.page_bytes(1) for spec in kinds}
    counts = [-(-len(layers) // shares[spec]) for spec, layers in kinds.items()]
    size = max(counts) if max(counts) < _MOST_PADDING * min(counts) else min(counts)
    groups = [
        KVCacheGroup(
            layers=tuple(layers[start : start + size * shares[spec]]),
            spec=spec,
            layers_per_page=shares[spec],
        )
        for spec, layers in sorted(kinds.items(), key=lambda kind: (kind[0].window, kind[1][0]))
        for start in range(0, len(layers), size * shares[spec])
    ]
    return KVCacheLayout(groups=tuple(groups), spec=most, states=states)
