"""Forward context: caches and attention inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kernels.attention import AttentionStep


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """KV cache of one layer: planes of keys and values, or one plane of latents (MLA)."""

    planes: tuple[torch.Tensor, ...]
    """Tensors [num_pages, page_size, local kv heads, head_dim] each."""
    v: torch.Tensor
    """Values: the second plane, or a view of the leading dimensions of the only one."""

    @property
    def k(self) -> torch.Tensor:
        """Keys, or latents: the first plane."""
        return self.planes[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """States of requests in one linear-attention layer: those of all slots, then snapshots."""

    conv: torch.Tensor
    """[states, taps - 1, local channels]: last inputs of the convolution."""
    recurrent: torch.Tensor
    """[states, local heads, key dim, value dim] fp32: recurrent states."""

    def copy(self, source: torch.Tensor | int, target: torch.Tensor | int) -> None:
        """Copies states with indices `source` to `target`: one each, or int64 [N] each."""
        self.conv[target] = self.conv[source]
        self.recurrent[target] = self.recurrent[source]


class StatePart(NamedTuple):
    """Consecutive tokens of one row, up to a position whose state is stored, or to the row's
    end."""

    start: int
    """Index of the first token among the step's tokens."""
    end: int
    """Index after the last token."""
    snapshot: int | None
    """Index in the state caches that the state after the last token is copied to; None for no
    copy."""
    is_first: bool
    """Whether the request begins here: its state then starts from zero, regardless of the slot's
    content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """Rows of a step for linear-attention layers."""

    slots: torch.Tensor
    """[D] int64: slots of the rows of one token."""
    is_first: torch.Tensor
    """[D] bool: whether the request of a row of one token begins with it."""
    longer: Sequence[tuple[int, Sequence[StatePart]]]
    """Slot and parts of each longer row."""
    stored: tuple[torch.Tensor, torch.Tensor] | None
    """Slots, and indices in the state caches that their states are copied to, int64 [N] each, of
    rows of one token; None without any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """Attention inputs of a step, shared by all layers of a group."""

    slot_mapping: torch.Tensor
    """[T] int64: cell of each token's key and value in the cache, page * page_size + offset."""
    decode: AttentionStep | None
    """Planned attention of decode rows; None without any."""
    extend: AttentionStep | None
    """Planned attention of longer rows; None without any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """Caches and planned attention of a step, whose tokens of decode rows come first."""

    kv_caches: Mapping[int, KVCache]
    """KV caches by layer with one."""
    attention: Mapping[int, AttentionInputs]
    """Attention inputs by layer that has a KV cache; layers of a group share one object."""
    num_decode_tokens: int
    """Number of leading tokens that are decode rows, of one token each."""
    logits_indices: torch.Tensor | None = None
    """[S] int64, ascending: tokens whose hidden states are needed; None for all. For other tokens
    the last layer only computes keys and values."""
    states: Mapping[int, StateCache] = field(default_factory=dict)
    """State caches by linear-attention layer."""
    state_rows: StateRows | None = None
    """Rows of the step for linear-attention layers; None without such layers."""
