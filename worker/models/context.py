"""The context of a forward pass: what it needs besides tokens and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kernels.attention import AttentionStep


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """The cache of one layer: keys and values of tokens, or a single tensor from which those of all
    heads are computed."""

    planes: tuple[torch.Tensor, ...]
    """[num_pages, page_size, local kv heads, head_dim] each."""
    v: torch.Tensor
    """The values: the second plane, or a view of leading dimensions of the only one."""

    @property
    def k(self) -> torch.Tensor:
        """The keys."""
        return self.planes[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """One layer's states of requests: those of all slots, then the snapshots."""

    conv: torch.Tensor
    """[states, taps - 1, local channels]: the last inputs of the convolution."""
    recurrent: torch.Tensor
    """[states, local heads, key dim, value dim] fp32."""

    def copy(self, source: torch.Tensor | int, target: torch.Tensor | int) -> None:
        """Copies states, one or several, int64 [N] each."""
        self.conv[target] = self.conv[source]
        self.recurrent[target] = self.recurrent[source]


class StatePart(NamedTuple):
    """Tokens of one row after which a snapshot is to be taken, or the last of the row."""

    start: int
    end: int
    """Among the step's tokens."""
    snapshot: int | None
    """The state that gets a copy of the one after it."""
    is_first: bool
    """Whether a request begins here, whatever its slot has held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """A step's rows, for layers that keep a state of each request."""

    slots: torch.Tensor
    """[D] int64: those of the rows of one token."""
    is_first: torch.Tensor
    """[D] bool: whether their requests begin with it."""
    longer: Sequence[tuple[int, Sequence[StatePart]]]
    """The slot of each longer row, and what it consists of."""
    stored: tuple[torch.Tensor, torch.Tensor] | None
    """Stores of rows of one token [N] int64: slots, and the states that get copies of theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """The inputs of a step that the layers of one group have in common."""

    slot_mapping: torch.Tensor
    """[T] int64: where each token's key and value go, page * page_size + offset."""
    decode: AttentionStep | None
    """None without decode rows."""
    extend: AttentionStep | None
    """None without longer rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """The step's caches and planned attention. Tokens of decode rows come first."""

    kv_caches: Mapping[int, KVCache]
    """KV caches by layer that has one."""
    attention: Mapping[int, AttentionInputs]
    """Inputs of attention by layer that has a KV cache; one object for all layers of a group."""
    num_decode_tokens: int
    """Leading tokens that are rows of their own."""
    read_tokens: torch.Tensor | None = None
    """[S] int64, ascending: tokens whose hidden states anyone reads; None for all. Of the others
    the last layer computes keys and values alone."""
    states: Mapping[int, StateCache] = field(default_factory=dict)
    """State caches by layer that keeps a state of each request."""
    state_rows: StateRows | None = None
    """None where no layer does."""
