"""Torch backend: gathers whole pages, then calls scaled dot product attention. It runs on CPU, and
is the reference for CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSettings,
    AttentionStep,
)
from kernels.attention.torch_invariant import InvariantStep
from kernels.attention.torch_invariant_plan import plan_invariant_decode, plan_invariant_extend
from kernels.attention.torch_plan import (
    DecodeGroup,
    ExtendPiece,
    causal_mask,
    plan_decode_groups,
    plan_extend_pieces,
)
from kernels.attention.values import has_latents, widened


def create(settings: AttentionSettings) -> TorchAttention:
    """Creates the backend.

    Raises:
        ValueError: batch-invariant attention is requested on CUDA, or with a soft cap.
    """
    if settings.batch_invariant and settings.device.type != "cpu":
        raise ValueError("--attention-backend torch is not batch-invariant: use auto or triton")
    if settings.batch_invariant and settings.cap:
        raise ValueError(
            "--batch-invariant is not supported on CPU for models with logit soft-capping: "
            "remove it"
        )
    return TorchAttention(batch_invariant=settings.batch_invariant, cap=settings.cap)


class TorchAttention(AttentionBackend):
    """Attention in torch: decodes in groups of rows of similar length, extends row by row.

    Args:
        batch_invariant: whether keys and queries are split at fixed positions instead.
        cap: soft cap of scores, as in AttentionSettings.
    """

    def __init__(self, *, batch_invariant: bool = False, cap: float = 0.0) -> None:
        self._batch_invariant, self._cap = batch_invariant, cap

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        """Plans the pages to gather, the rows to compute together, and the positions to mask."""
        if metadata.query_start is None:
            if self._batch_invariant:
                return InvariantStep(plan_invariant_decode(metadata))
            return DecodeStep(plan_decode_groups(metadata), self._cap)
        if self._batch_invariant:
            return InvariantStep(plan_invariant_extend(metadata))
        return ExtendStep(plan_extend_pieces(metadata), self._cap)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Parameters of attention: scale of scores, soft cap, sinks, and scale of values."""

    scale: float
    cap: float
    sinks: torch.Tensor | None
    value_scale: float
    """Scale of values in the cache, by which the result is multiplied."""

    @property
    def are_special(self) -> bool:
        """Whether there is a soft cap or a sink, which torch's attention does not support."""
        return self.cap > 0 or self.sinks is not None

    def scale_values(self, out: torch.Tensor) -> torch.Tensor:
        """Multiplies results of attention by the scale of values."""
        return out if self.value_scale == 1.0 else out * self.value_scale


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Planned decodes: one attention call per group of rows."""

    groups: tuple[DecodeGroup, ...]
    cap: float

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        """Computes the attention of one query per row; arguments as in AttentionStep."""
        scores = _Scores(scale, self.cap, sinks, value_scale)
        if len(self.groups) == 1 and self.groups[0].rows is None:
            return scores.scale_values(_decode_group(q, k_cache, v_cache, self.groups[0], scores))
        out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
        for group in self.groups:
            assert group.rows is not None, "several groups have row indices"
            queries = q.index_select(0, group.rows)
            part = _decode_group(queries, k_cache, v_cache, group, scores)
            out.index_copy_(0, group.rows, part)
        return scores.scale_values(out)


def _decode_group(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: DecodeGroup,
    scores: _Scores,
) -> torch.Tensor:
    rows = q.shape[0]
    k = _gather_pages(k_cache, group.pages, rows, q.dtype)[:, :, : group.length]
    mask = group.mask if group.mask is None else group.mask.to(q.dtype)
    if has_latents(k_cache, v_cache):
        # Latents: with heads as rows of one matmul, their shared keys are read once.
        found = scaled_dot_product_attention(
            q.unsqueeze(1), k, k, attn_mask=mask, scale=scores.scale
        )
        return found.squeeze(1)[..., : v_cache.shape[3]]
    v = _gather_pages(v_cache, group.pages, rows, q.dtype)[:, :, : group.length]
    if scores.are_special:
        return _attend_by_hand(q.unsqueeze(2), k, v, mask, scores).squeeze(2)
    out = scaled_dot_product_attention(
        q.unsqueeze(2),
        k,
        widened(v, k.shape[3]),
        attn_mask=mask,
        scale=scores.scale,
        enable_gqa=q.shape[1] != k_cache.shape[2],
    )
    return out.squeeze(2)[..., : v_cache.shape[3]]


@dataclass(frozen=True, slots=True)
class ExtendStep:
    """Planned extends: one attention call per row, or per chunk of queries of a long row."""

    pieces: tuple[ExtendPiece, ...]
    cap: float

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        """Computes the attention of any number of queries per row; arguments as in
        AttentionStep."""
        scores = _Scores(scale, self.cap, sinks, value_scale)
        parts = [_extend_piece(q, k_cache, v_cache, piece, scores) for piece in self.pieces]
        if len(parts) == 1:
            return scores.scale_values(parts[0])
        if not parts:
            return q.new_empty(*q.shape[:2], v_cache.shape[3])
        return scores.scale_values(torch.cat(parts))


def _extend_piece(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    piece: ExtendPiece,
    scores: _Scores,
) -> torch.Tensor:
    queries = q[piece.query_start : piece.query_stop].transpose(0, 1).unsqueeze(0)
    k = _gather_pages(k_cache, piece.pages, 1, q.dtype)[:, :, : piece.length]
    if has_latents(k_cache, v_cache):
        k = v = k.expand(-1, q.shape[1], -1, -1)
    else:
        v = _gather_pages(v_cache, piece.pages, 1, q.dtype)[:, :, : piece.length]
    mask = piece.mask
    if scores.are_special:
        if piece.is_causal:
            positions = torch.arange(piece.length, device=q.device)
            mask = causal_mask(positions, positions.unsqueeze(1) + 1)
        return _attend_by_hand(queries, k, v, mask, scores).squeeze(0).transpose(0, 1)
    out = scaled_dot_product_attention(
        queries,
        k,
        widened(v, k.shape[3]),
        attn_mask=mask if mask is None else mask.to(q.dtype),
        is_causal=piece.is_causal,
        scale=scores.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)[..., : v_cache.shape[3]]


def _attend_by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    how: _Scores,
) -> torch.Tensor:
    """Attention of q [B, Hq, n, D] to k [B, Hkv, L, D] and v [B, Hkv, L, Dv], with soft cap and
    sinks: [B, Hq, n, Dv]. The mask [..., n or 1, L] is added to scores."""
    group = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, group)).flatten(2, 3)
    scores = (rows @ k.transpose(2, 3)).float().mul_(how.scale).unflatten(2, (group, -1))
    if how.cap:
        scores = scores.div_(how.cap).tanh_().mul_(how.cap)
    if mask is not None:
        scores = scores + (mask if mask.ndim == 2 else mask.unsqueeze(1))
    if how.sinks is not None:
        sinks = how.sinks.view(-1, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype).flatten(2, 3)
    out: torch.Tensor = (weights @ v).unflatten(2, (group, -1)).flatten(1, 2)
    return out


def _gather_pages(
    cache: torch.Tensor, pages: torch.Tensor, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Copies pages [rows * n] out of a cache, and converts them from FP8: [rows, Hkv, n *
    page_size, D] (a strided view)."""
    num_pages, _, num_kv_heads, head_dim = cache.shape
    flat = cache.view(num_pages, -1).index_select(0, pages).to(dtype)
    return flat.view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
