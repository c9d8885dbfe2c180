"""Forward context: caches and attention inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kernels.attention import AttentionStep
from kernels.mla_prefill import ExpandedRows
from kernels.sparse_attention import SparseQueries
from kernels.states import StateCache, StateRows


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """KV cache of one layer: planes of keys and values, or one plane of latents (MLA)."""

    planes: tuple[torch.Tensor, ...]
    """Tensors [num_pages, page_size, local kv heads, head_dim] each; values may be narrower. Index
    keys, if any, are last."""
    v: torch.Tensor
    """Values: the second plane, or a view of the leading dimensions of the latents."""
    index_keys: torch.Tensor | None = None
    """[num_pages, page_size, 1, dim]: keys by which sparse attention selects tokens; None if the
    layer caches none."""

    @property
    def k(self) -> torch.Tensor:
        """Keys, or latents: the first plane."""
        return self.planes[0]


@dataclass(kw_only=True, slots=True)
class SparseInputs:
    """Inputs for the queries of a step that attend to a selection of the earlier tokens. The other
    queries attend to all earlier tokens, since they have no more than the selection would contain.
    """

    queries: SparseQueries
    tokens: torch.Tensor | None
    """[N] int64, ascending: tokens of the step to which these queries belong; None for all."""
    others: torch.Tensor | None
    """[M] int64, ascending: the other tokens of the step; None if there are none."""
    num_other_decodes: int
    """Number of leading tokens in `others` that are decode rows."""
    cells: torch.Tensor | None = None
    """[N, top_k] int32: cache cells selected by the latest layer with an indexer, as returned by
    `select_tokens`; None before the first such layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedInputs:
    """Inputs for the rows of a step whose attention to latents (MLA) is computed in expanded
    form."""

    rows: ExpandedRows
    tokens: torch.Tensor | None
    """[N] int64, ascending: tokens of the step that belong to these rows; None for all tokens."""
    others: torch.Tensor | None
    """[M] int64, ascending: the other tokens of the step; None if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """Attention inputs of a step, shared by all layers of a KV cache group."""

    slot_mapping: torch.Tensor
    """[T] int64: cache cell of each token's key and value, page * page_size + offset."""
    decode: AttentionStep | None
    """Planned attention of decode rows; None if there are none."""
    extend: AttentionStep | None
    """Planned attention of longer rows; None if there are none."""
    sparse: SparseInputs | None = None
    """Queries that attend to a selection of tokens; `decode` and `extend` exclude them. None if
    there are none."""
    expanded: ExpandedInputs | None = None
    """Rows computed in expanded form; `extend` excludes them. None if there are none."""
    dense: AttentionInputs | None = None
    """Inputs of the group's layers that attend to all tokens; None if there are no such layers or
    `sparse` is None."""
    canvases: AttentionStep | None = None
    """Planned attention of canvases, whose rows come last; None if there are none."""
    num_canvas_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """Caches and planned attention of a step. The tokens of decode rows come first."""

    kv_caches: Mapping[int, KVCache]
    """KV caches, by index of the layers that have one."""
    attention: Mapping[int, AttentionInputs]
    """Attention inputs, by index of the layers that have a KV cache; a group's layers share one."""
    num_decode_tokens: int
    """Number of leading tokens that are decode rows, with one token each."""
    logits_indices: torch.Tensor | None = None
    """[S] int64, ascending: tokens whose hidden states are needed; None for all tokens. For other
    tokens, the last layer only computes keys and values."""
    states: Mapping[int, StateCache] = field(default_factory=dict)
    """State caches, by index of the layers that keep a state per request."""
    state_rows: StateRows | None = None
    """Rows of the step for layers that keep a state; None if there are no such layers."""
    signal: torch.Tensor | None = None
    """[C, hidden]: self-conditioning signal for the tokens of canvases, which are the last tokens
    of the step; None if the step only computes known tokens."""
    row_lengths: Sequence[int] = ()
    """Number of tokens of each row, for bidirectional encoders, whose rows are whole prompts; empty
    for other models."""
    token_types: torch.Tensor | None = None
    """[T] int64: token types of encoders; None if all are 0."""
    per_layer: torch.Tensor | None = None
    """[T, layers, size], or [S, layers, size] in layers that only compute the tokens in
    `logits_indices`: per-layer embeddings; None in models without them."""
