"""KV cache layout: what each layer caches per token or request, and how layers share pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, Protocol

import torch

from kernels.mla_prefill import Expansion
from worker.protocol.page_groups import PageGroups

_MOST_PADDING = 1.25
"""Ratio of the largest to the smallest number of layers per kind, below which groups have as many
layers as the most frequent kind. Pages of smaller groups then have unused memory, but requests have
fewer page tables."""


class IndexKeys(NamedTuple):
    """Keys by which sparse attention selects tokens, one per token, in a separate plane."""

    dim: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """KV cache of one layer on one rank, per token."""

    num_kv_heads: int
    """Number of KV heads on this rank."""
    head_dim: int
    dtype: torch.dtype
    window: int = 0
    """Sliding window: number of positions that a query attends to, including its own; 0 for full
    attention. Positions before the windows of all later queries are freed."""
    is_chunked: bool = False
    """Whether attention is chunked: a query attends to its chunk of `window` positions, up to
    itself. The cache keeps the same positions as with a sliding window."""
    value_dim: int = 0
    """Number of leading dimensions of keys that are the values (MLA); 0 if values have a separate
    plane."""
    own_value_dim: int = 0
    """Dimensions of a value in a separate plane, if they differ from `head_dim`; otherwise 0."""
    top_k: int = 0
    """Number of cached tokens that sparse attention selects per query; 0 for full attention."""
    has_dense_layers: bool = False
    """Whether some layers with this `top_k` attend to all tokens (`AttentionInputs.dense`)."""
    index_keys: IndexKeys | None = None
    """Index keys that the layer caches in addition to its planes; None if it has none, or reuses an
    earlier layer's selection."""
    expansion: Expansion | None = None
    """Sizes of keys and values that are computed from latents for long prompts; None if all rows
    attend to the latents themselves."""

    @property
    def num_planes(self) -> int:
        """Number of cache tensors: two for keys and values, one for latents."""
        return 1 if self.value_dim else 2

    def page_bytes(self, page_size: int) -> int:
        """Size of the layer's part of a page with `page_size` tokens, in bytes."""
        return sum(map(prod, self.page_shapes(page_size))) * self.dtype.itemsize

    def page_shapes(self, page_size: int) -> tuple[tuple[int, int, int], ...]:
        """Shape of each plane of a page: [tokens, heads, head_dim]."""
        sizes = (self.head_dim, self.own_value_dim or self.head_dim)[: self.num_planes]
        return tuple((page_size, self.num_kv_heads, size) for size in sizes)


class StatePlane(NamedTuple):
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    """Shape per request."""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """State of one layer on one rank, per request, independent of its length: last inputs of a
    convolution, a recurrent state, or both."""

    planes: tuple[StatePlane, ...]
    """Tensors that the state consists of."""
    inputs: tuple[StatePlane, ...] = ()
    """What the layer computes from a token before it reads the state; shapes are per token. These
    inputs are kept for drafts, which may be rejected (`kernels.states.Replay`)."""

    @property
    def num_bytes(self) -> int:
        """Size of the state of one request, in bytes."""
        return _num_bytes(self.planes)

    @property
    def input_bytes(self) -> int:
        """Size of the inputs of one token, in bytes."""
        return _num_bytes(self.inputs)


def _num_bytes(planes: Iterable[StatePlane]) -> int:
    return sum(prod(plane.shape) * plane.dtype.itemsize for plane in planes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheGroup:
    """Layers with the same spec that share page ids.

    Layers at the same index in different groups share a tensor and use different pages of it.
    Layers that cache less per token than others may share a tensor within a group:

        tensor i   page 0                page 1
        a group    layer i               layer i
        another    layer 2i, layer 2i+1  layer 2i, layer 2i+1      layers_per_page 2
    """

    layers: tuple[int, ...]
    """Indices of the layers, ascending."""
    spec: KVCacheSpec
    """Specification of each layer in the group."""
    layers_per_page: int = 1
    """Number of layers that share a page of a tensor."""
    page_table: int = 0
    """Index of the page table with the group's pages."""

    @property
    def window(self) -> int:
        """Sliding window of the group's layers, as in KVCacheSpec; 0 for full attention."""
        return self.spec.window

    @property
    def num_tensors(self) -> int:
        """Number of tensors per plane that the group's layers need."""
        return -(-len(self.layers) // self.layers_per_page)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheLayout:
    """Groups of a model's layers: layers of a group have equal specs, and pages of all groups have
    the same size."""

    groups: tuple[KVCacheGroup, ...]
    """Groups of layers, full-attention ones first."""
    spec: KVCacheSpec
    """Specification of the layer that caches the most bytes per token."""
    states: Mapping[int, StateSpec] = field(default_factory=dict)
    """States, by index of the layers that keep one; such a layer may also be in a group."""
    index_keys: Mapping[int, IndexKeys] = field(default_factory=dict)
    """Index keys, by index of the layers that cache them; other layers of the same group may have
    none."""
    beside: tuple[KVCacheGroup, ...] = ()
    """Layers of an EAGLE-3 head. Each has its own planes in the pages of the first group, since its
    specification may differ from those of the model's layers."""

    def with_beside(self, layer: int, spec: KVCacheSpec) -> KVCacheLayout:
        """This layout with another layer in `beside`."""
        return replace(self, beside=(*self.beside, KVCacheGroup(layers=(layer,), spec=spec)))

    @property
    def state_bytes(self) -> int:
        """Size of one request's state in all layers, in bytes."""
        return sum(spec.num_bytes for spec in self.states.values())

    @property
    def state_input_bytes(self) -> int:
        """Size of one token's inputs of the states in all layers, in bytes."""
        return sum(spec.input_bytes for spec in self.states.values())

    def slot_bytes(self, num_replayed: int) -> int:
        """Size of one request's state, in bytes, including the inputs of `num_replayed` tokens that
        are replayed into it."""
        return self.state_bytes + self.state_input_bytes * num_replayed

    def snapshot_pages(self, page_size: int) -> int:
        """Number of pages that take as much memory as one request's state; 0 if there are no
        states."""
        return -(-self.state_bytes // self.page_bytes(page_size))

    @property
    def group_size(self) -> int:
        """Number of tensors per plane, as needed by the largest group."""
        return max(group.num_tensors for group in self.groups)

    @property
    def page_groups(self) -> PageGroups:
        """The layout's page groups, for the scheduler."""
        windows = [group.window for group in self.groups if group.window]
        return PageGroups(
            num_full=len(self.groups) - len(windows),
            num_window=len(windows),
            window=max(windows, default=0),
        )

    def page_bytes(self, page_size: int) -> int:
        """Size of one page in all tensors and planes, in bytes."""
        index_bytes = sum(keys.dim * keys.dtype.itemsize for keys in self.index_keys.values())
        beside = sum(group.spec.page_bytes(page_size) for group in self.beside)
        return self.group_size * self.spec.page_bytes(page_size) + index_bytes * page_size + beside


class CachingLayer(Protocol):
    """Interface of a layer, limited to its caches."""

    kv_cache_spec: KVCacheSpec | None
    """Specification of the layer's KV cache; None if there is none."""
    state_spec: StateSpec | None
    """Specification of the layer's state per request; None if there is none."""


def layout_of(layers: Sequence[CachingLayer]) -> KVCacheLayout:
    """Layout of the caches of a model's layers; raises ValueError like `group_layers`."""
    return group_layers(
        [layer.kv_cache_spec for layer in layers], [layer.state_spec for layer in layers]
    )


def _may_share(spec: KVCacheSpec, most: KVCacheSpec) -> bool:
    """Whether a page of the largest spec holds a whole number of pages of this spec, the same
    number in each plane."""
    if (spec.dtype, spec.num_planes) != (most.dtype, most.num_planes):
        return False
    sizes = zip(spec.page_shapes(1), most.page_shapes(1), strict=True)
    ratios = {divmod(prod(largest), prod(own)) for own, largest in sizes}
    return len(ratios) == 1 and ratios.pop()[1] == 0


def group_layers(
    specs: Sequence[KVCacheSpec | None], state_specs: Sequence[StateSpec | None] = ()
) -> KVCacheLayout:
    """Groups the layers of a model by their specs.

    If there are more layers of one spec than of another, they form several groups. The last group
    may have fewer layers, and its pages are then partly unused. Index keys are in separate tensors,
    so layers with and without them may share a group.

    Args:
        specs: specification of each layer's KV cache; None for a layer without one, which is in no
            group.
        state_specs: specification of each layer's state per request; None for a layer without one.

    Raises:
        ValueError: page sizes of two specs are not multiples of each other, or types or planes
            differ; or a hybrid model (with states) has sliding windows, or no full-attention
            layer; or layers with index keys are in several groups.
    """
    states = {layer: spec for layer, spec in enumerate(state_specs) if spec is not None}
    paged = [(layer, spec) for layer, spec in enumerate(specs) if spec is not None]
    if not paged or (states and any(spec.window for _, spec in paged)):
        raise ValueError(
            "unsupported layers: layers with a state per request require full-attention layers "
            "and no sliding windows"
        )
    index_keys = {layer: spec.index_keys for layer, spec in paged if spec.index_keys is not None}
    paged = [(layer, replace(spec, index_keys=None)) for layer, spec in paged]
    most_layer, most = max(paged, key=lambda entry: entry[1].page_bytes(1))
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in paged:
        if not _may_share(spec, most):
            raise ValueError(
                f"unsupported layers: page sizes of layer {layer} ({spec}) and layer {most_layer} "
                f"({most}) are not multiples of each other, or their types differ"
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
    if index_keys and len(groups) > 1:
        raise ValueError(
            "unsupported layers: sparse attention requires the same KV cache spec (size, type and "
            "window) in all layers"
        )
    numbered = tuple(replace(group, page_table=number) for number, group in enumerate(groups))
    return KVCacheLayout(groups=numbered, spec=most, states=states, index_keys=index_keys)
