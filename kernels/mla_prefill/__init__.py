"""Attention of MLA prompts in expanded form: keys and values of each head are computed from the
cached latents, one chunk of keys at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.torch_plan import causal_mask
from kernels.attention.values import widened
from kernels.mla_prefill.base import ExpandedRows, Expansion, KeyPiece, plan_expanded_rows
from kernels.registry import op

_MAX_PAIRS = 1 << 20
"""Maximum number of pairs of queries and keys whose mask is computed at a time."""


class SoftmaxState(NamedTuple):
    """Attention of queries over the chunks of keys so far; empty if no row has several chunks."""

    output: torch.Tensor
    """fp32 [T or 0, H, Dv]: output so far."""
    lse: torch.Tensor
    """fp32 [T or 0, H]: log-sum-exp of the scores, to base 2."""


def mla_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    up: torch.Tensor,
    rows: ExpandedRows,
    sizes: Expansion,
    *,
    scale: float,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of rows in expanded form: [T, H, Dv].

    Besides the result, the op allocates `sizes.most_keys` expanded keys and their latents, and,
    if a row has more keys than that, an fp32 sum of values for each query and head.

    Args:
        q: [T, H, P + R]: queries, with rotary embedding of the last R dimensions; heads are
            contiguous, rows may be strided.
        cache: [num_pages, page_size, 1, V + R]: latents and rotary parts of keys, including those
            of the step's tokens, in the dtype of q or in FP8 (e4m3).
        up: [H * (P + Dv), V]: weight of the projection from latents to each head's key and value.
        rows: the rows' plan.
        sizes: H, V, R, P and Dv.
        scale: factor by which scores are multiplied, including the scale of an FP8 cache.
        value_scale: scale of an FP8 cache, by which the result is multiplied.
    """
    out = q.new_empty(*q.shape[:2], sizes.value_dim)
    kept = out if rows.has_parts else out[:0]
    output = torch.empty_like(kept, dtype=torch.float32)
    state = SoftmaxState(output, output.new_empty(kept.shape[:2]))
    # Its size is fixed, so that any step whose memory is measured allocates the maximum.
    buffer = q.new_empty(sizes.most_keys, sizes.width)
    for piece in rows.pieces:
        latents = _gather(cache, piece.cells).to(q.dtype)
        expanded = buffer[: len(latents)]
        torch.mm(latents[:, : sizes.latent_dim], up.T, out=expanded)
        keys = expanded.view(len(latents), sizes.num_heads, -1)
        rotary = latents[:, sizes.latent_dim :]
        attend_to_expanded(
            *(q, keys, rotary, out, rows, piece, state), scale=scale, value_scale=value_scale
        )
    return out


def _gather(cache: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Copies cells out of a cache: [K, V + R]; as bytes, since not all devices support indexing
    FP8."""
    rows = cache.view(-1, cache.shape[3])
    if cache.dtype.itemsize > 1:
        return rows.index_select(0, cells)
    return rows.view(torch.uint8).index_select(0, cells).view(cache.dtype)


@op
def attend_to_expanded(
    q: torch.Tensor,
    expanded: torch.Tensor,
    rotary: torch.Tensor,
    out: torch.Tensor,
    rows: ExpandedRows,
    piece: KeyPiece,
    state: SoftmaxState,
    *,
    scale: float,
    value_scale: float = 1.0,
) -> None:
    """Computes the attention of the queries of a chunk's rows over its keys.

    Chunks of a row are attended to in order: each continues the softmax of the previous one, and
    the result is written when a query has attended to its last key.

    Args:
        q: [T, H, P + R]; heads are contiguous, rows may be strided.
        expanded: [K, H, P + Dv]: keys without rotary embedding, and values.
        rotary: [K, R]: rotary parts of the keys, which all heads share; rows may be strided.
        out: [T, H, Dv]: results are written to it.
        rows: the rows' plan.
        piece: the chunk's rows and the positions of its keys.
        state: state of the softmax of all queries.
        scale: factor by which scores are multiplied.
        value_scale: factor by which results are multiplied.
    """
    plain_dim = q.shape[2] - rotary.shape[1]
    firsts = [0]
    for length in rows.query_lens_host:
        firsts.append(firsts[-1] + length)
    first_key = 0
    for row in range(piece.first_row, piece.last_row):
        seq_len, queries = rows.seq_lens_host[row], rows.query_lens_host[row]
        num_keys = min(piece.stop, seq_len) - piece.start
        keys = slice(first_key, first_key + num_keys)
        first_key += num_keys
        k, v = expanded[keys].split([plain_dim, out.shape[2]], dim=2)
        shared = rotary[keys].unsqueeze(1).expand(-1, k.shape[1], -1)
        k, v = torch.cat((k, shared), dim=2).transpose(0, 1), v.transpose(0, 1)
        prefix = seq_len - queries - piece.start
        is_whole = num_keys == seq_len
        step = queries if is_whole and not prefix else max(1, _MAX_PAIRS // num_keys)
        for begin in range(0, queries, step):
            end = min(begin + step, queries)
            seen = min(prefix + end, num_keys)
            if seen <= 0:
                continue
            part = slice(firsts[row] + begin, firsts[row] + end)
            scores = _Queries(q[part].transpose(0, 1), prefix + begin, scale)
            if is_whole:
                out[part] = scores.attend(k[:, :seen], v[:, :seen]) * value_scale
            else:
                parts = SoftmaxState(state.output[part], state.lse[part])
                scores.advance(k[:, :seen], v[:, :seen], parts, is_first=piece.start == 0)
                out[part] = (parts.output * value_scale).to(out.dtype)


class _Queries(NamedTuple):
    """Consecutive queries [H, n, D] of a row, the first of which attends to `first + 1` keys."""

    q: torch.Tensor
    first: int
    scale: float

    def mask(self, num_keys: int) -> torch.Tensor:
        """[n, num_keys]: 0 for keys to which a query attends, otherwise -inf."""
        positions = torch.arange(num_keys, device=self.q.device)
        visible = torch.arange(self.q.shape[1], device=self.q.device) + self.first + 1
        return causal_mask(positions, visible.unsqueeze(1)).to(self.q.dtype)

    def attend(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention over all keys of a row: [n, H, Dv]."""
        q, num_keys = self.q.unsqueeze(0), k.shape[1]
        is_square = self.first == 0 and q.shape[2] == num_keys
        found = scaled_dot_product_attention(
            *(q, k.unsqueeze(0), widened(v, k.shape[2]).unsqueeze(0)),
            attn_mask=None if is_square else self.mask(num_keys),
            is_causal=is_square,
            scale=self.scale,
        )
        return found.squeeze(0).transpose(0, 1)[..., : v.shape[2]]

    def advance(
        self, k: torch.Tensor, v: torch.Tensor, state: SoftmaxState, *, is_first: bool
    ) -> None:
        """Continues the softmax of these queries with a chunk of keys."""
        scores = (self.q @ k.transpose(1, 2)).float() * (self.scale * _LOG2_E)
        scores += self.mask(k.shape[1]).float()
        if not is_first:
            scores = torch.cat((state.lse.T.unsqueeze(2), scores), dim=2)
        lse = torch.logsumexp(scores * _LN_2, dim=2) / _LN_2
        weights = torch.exp2(scores - lse.unsqueeze(2))
        own = (weights[..., -k.shape[1] :].to(v.dtype) @ v).float().transpose(0, 1)
        if not is_first:
            own += weights[..., 0].T.unsqueeze(2) * state.output
        state.output.copy_(own)
        state.lse.copy_(lse.T)


_LN_2 = 0.6931471805599453
_LOG2_E = 1.0 / _LN_2


__all__ = [
    "ExpandedRows",
    "Expansion",
    "KeyPiece",
    "SoftmaxState",
    "attend_to_expanded",
    "mla_prefill",
    "plan_expanded_rows",
]
