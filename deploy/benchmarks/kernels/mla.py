"""Case of benchmark `kernels` for MLA prefill with expanded keys and values, at DeepSeek V3's
sizes."""

from __future__ import annotations

from functools import partial

import torch

from deploy.benchmarks.kernels.case import Case
from kernels import Expansion, mla_prefill
from kernels.attention import AttentionMetadata
from kernels.mla_prefill import plan_expanded_rows

_LATENT, _ROTARY, _PLAIN, _VALUE = 512, 64, 128, 128
_PAGE_SIZE = 64


def expanded_prompt(
    queries: int, context: int, heads: int, device: torch.device, dtype: torch.dtype
) -> Case:
    """Case of a prefill chunk that ends after `context` tokens, including the expansion of all keys
    and values.

    Args:
        queries: tokens in the chunk.
        context: tokens in the KV cache, including the chunk.
        heads: number of attention heads.
        device: device of all tensors.
        dtype: data type of weights, activations and KV cache.
    """
    length = max(context, queries)
    columns = -(-length // _PAGE_SIZE)
    sizes = Expansion(heads, _LATENT, _ROTARY, _PLAIN, _VALUE, itemsize=dtype.itemsize)
    extend = AttentionMetadata(
        page_table=torch.randperm(columns, device=device).int().unsqueeze(0),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        seq_lens_host=[length],
        query_start=torch.tensor([0, queries], dtype=torch.int32, device=device),
        query_lens_host=[queries],
        page_size=_PAGE_SIZE,
    )
    q = torch.randn(queries, heads, _PLAIN + _ROTARY, device=device).to(dtype)
    cache = torch.zeros(columns, _PAGE_SIZE, 1, _LATENT + _ROTARY, device=device, dtype=dtype)
    up = torch.randn(sizes.width, _LATENT, device=device).to(dtype)
    rows = plan_expanded_rows(extend, sizes.most_keys)
    pairs = queries * (length - queries) + queries * (queries + 1) / 2
    expanding = length * sizes.width * _LATENT
    return Case(
        op="attend_to_expanded",
        shape=f"{queries} tokens after {length - queries}, {heads} heads, expanded",
        run=partial(mla_prefill, q, cache, up, rows, sizes, scale=0.1),
        num_bytes=float((2 * q.numel() + cache.numel() + up.numel()) * dtype.itemsize),
        num_flops=2.0 * (expanding + pairs * heads * (_PLAIN + _ROTARY + _VALUE)),
    )
