"""Sparse-attention cases of benchmark `kernels`, at the sizes of DeepSeek V3.2 and MiniMax-M3: each
decode selects up to 2,048 of the cached tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from deploy.benchmarks.kernels.case import Case
from kernels import (
    SparseQueries,
    attend_to_blocks,
    attend_to_cells,
    select_blocks,
    select_tokens,
    store_index_keys,
)
from kernels.sparse_attention import SparsePiece

_INDEX_HEADS, _INDEX_DIM, _ROTARY_DIM = 64, 128, 64
_LATENT_DIM, _VALUE_DIM = 576, 512
_TOP_K, _PAGE_SIZE = 2048, 64
_BLOCK_SIZE, _KV_HEADS = 128, 4
"""Sizes of MiniMax-M3, whose index keys have the same dimension as DeepSeek V3.2's."""


def _store(rows: int, context: int, heads: int, device: torch.device, dtype: torch.dtype) -> Case:
    keys = torch.randn(rows, _INDEX_DIM, device=device).to(dtype)
    places = torch.arange(rows, device=device)
    run = partial(
        store_index_keys,
        *(keys, _zeros(rows, _INDEX_DIM, device, dtype), places * _PAGE_SIZE),
        positions=torch.full_like(places, context - 1),
        cos_sin_cache=torch.randn(context, _ROTARY_DIM, device=device),
    )
    num_bytes = 2.0 * keys.nbytes
    return Case(op="store_index_keys", shape=f"{rows} tokens", run=run, num_bytes=num_bytes)


def _select(rows: int, context: int, heads: int, device: torch.device, dtype: torch.dtype) -> Case:
    columns = -(-context // _PAGE_SIZE)
    pages = torch.arange(rows * columns, device=device).view(rows, columns)
    queries = SparseQueries(
        pieces=(SparsePiece(0, rows, pages, context),),
        positions=torch.full((rows,), context - 1, device=device),
        top_k=min(_TOP_K, context),
        page_size=_PAGE_SIZE,
    )
    q = torch.randn(rows, _INDEX_HEADS, _INDEX_DIM, device=device).to(dtype)
    run = partial(
        select_tokens,
        *(q, torch.randn(rows, _INDEX_HEADS, device=device)),
        *(_zeros(rows * columns, _INDEX_DIM, device, dtype), queries),
        cos_sin_cache=torch.randn(context, _ROTARY_DIM, device=device),
    )
    return Case(
        op="select_tokens",
        shape=f"{rows} rows of {context}",
        run=run,
        num_bytes=float(rows * context * _INDEX_DIM * dtype.itemsize + q.nbytes),
        num_flops=2.0 * rows * context * _INDEX_HEADS * _INDEX_DIM,
    )


def _attend(rows: int, context: int, heads: int, device: torch.device, dtype: torch.dtype) -> Case:
    columns, top_k = -(-context // _PAGE_SIZE), min(_TOP_K, context)
    cells = torch.rand(rows, columns * _PAGE_SIZE, device=device).argsort(1)[:, :top_k]
    cells += torch.arange(rows, device=device).unsqueeze(1) * columns * _PAGE_SIZE
    q = torch.randn(rows, heads, _LATENT_DIM, device=device).to(dtype)
    cache = _zeros(rows * columns, _LATENT_DIM, device, dtype)
    values_per_token = _LATENT_DIM + _VALUE_DIM
    return Case(
        op="attend_to_cells",
        shape=f"{rows} rows, {top_k} of {context} tokens, {heads} heads",
        run=partial(attend_to_cells, q, cache, cells.int(), _VALUE_DIM, scale=0.1),
        num_bytes=float((rows * top_k * _LATENT_DIM + 2 * q.numel()) * dtype.itemsize),
        num_flops=2.0 * rows * top_k * heads * values_per_token,
    )


def _select_blocks(
    rows: int, context: int, heads: int, device: torch.device, dtype: torch.dtype
) -> Case:
    q, cache, queries = _block_queries(rows, context, device, dtype)
    run = partial(
        select_blocks,
        *(q, cache, queries, _BLOCK_SIZE),
        cos_sin_cache=torch.randn(context, _ROTARY_DIM, device=device),
    )
    return Case(
        op="select_blocks",
        shape=f"{rows} rows of {context}",
        run=run,
        num_bytes=float(rows * context * _INDEX_DIM * dtype.itemsize + q.nbytes),
        num_flops=2.0 * rows * context * _KV_HEADS * _INDEX_DIM,
    )


def _attend_to_blocks(
    rows: int, context: int, heads: int, device: torch.device, dtype: torch.dtype
) -> Case:
    index_q, index_keys, queries = _block_queries(rows, context, device, dtype)
    table = torch.randn(context, _ROTARY_DIM, device=device)
    selection = select_blocks(index_q, index_keys, queries, _BLOCK_SIZE, cos_sin_cache=table)
    shape = (len(index_keys), _PAGE_SIZE, _KV_HEADS, _INDEX_DIM)
    caches = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(rows, 16 * _KV_HEADS, _INDEX_DIM, device=device).to(dtype)
    return Case(
        op="attend_to_blocks",
        shape=f"{rows} rows, {queries.top_k} of {context} tokens, {q.shape[1]} heads",
        run=partial(attend_to_blocks, q, (caches[0], caches[1]), selection, scale=0.1),
        num_bytes=2.0
        * (rows * queries.top_k * _KV_HEADS * _INDEX_DIM + q.numel())
        * dtype.itemsize,
        num_flops=4.0 * rows * queries.top_k * q.shape[1] * _INDEX_DIM,
    )


def _block_queries(
    rows: int, context: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, SparseQueries]:
    """Index queries [rows, heads, dim], the cache of index keys, and the step's SparseQueries, at
    MiniMax-M3's sizes."""
    columns = -(-context // _PAGE_SIZE)
    queries = SparseQueries(
        pieces=(
            SparsePiece(
                *(0, rows, torch.arange(rows * columns, device=device).view(rows, -1), context)
            ),
        ),
        positions=torch.full((rows,), context - 1, device=device),
        top_k=_TOP_K,
        page_size=_PAGE_SIZE,
    )
    q = torch.randn(rows, _KV_HEADS, _INDEX_DIM, device=device).to(dtype)
    return q, _zeros(rows * columns, _INDEX_DIM, device, dtype), queries


def _zeros(num_pages: int, dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_pages, _PAGE_SIZE, 1, dim, device=device, dtype=dtype)


SPARSE_CASES: dict[str, Callable[[int, int, int, torch.device, torch.dtype], Case]] = {
    "store_index_keys": _store,
    "select_tokens": _select,
    "attend_to_cells": _attend,
    "select_blocks": _select_blocks,
    "attend_to_blocks": _attend_to_blocks,
}
"""Functions that create cases, keyed by op. Arguments are rows per step, cached tokens per row,
query heads, device and data type."""
