"""Random paged caches, and a naive fp64 reference of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSettings,
    create_attention_backend,
)
from kernels.attention.values import has_latents

MOST_HEADS = 16
"""Maximum number of query heads that attend to latents."""


@dataclass
class Paged:
    """A cache with one random, scattered page row per sequence length."""

    lens: list[int]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    scale: float
    cap: float = 0.0
    sinks: torch.Tensor | None = None
    value_scale: float = 1.0

    def in_fp8(self, key_scale: float = 1.0, value_scale: float = 1.0) -> Paged:
        """The same data in an FP8 cache. Values of latents have the keys' scale."""
        k_cache, v_cache = (
            (cache / scale).to(torch.float8_e4m3fn)
            for cache, scale in ((self.k_cache, key_scale), (self.v_cache, value_scale))
        )
        if has_latents(self.k_cache, self.v_cache):
            v_cache, value_scale = k_cache[..., : self.v_cache.shape[3]], key_scale
        scale = self.scale * key_scale
        return replace(self, k_cache=k_cache, v_cache=v_cache, scale=scale, value_scale=value_scale)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device=self.k_cache.device)

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[1]

    def row(self, cache: torch.Tensor, row: int) -> torch.Tensor:
        return cache[self.page_table[row].long()].flatten(0, 1)[: self.lens[row]]

    def decodes(self, window: int = 0, *, is_chunked: bool = False) -> AttentionMetadata:
        return AttentionMetadata(
            page_table=self.page_table,
            seq_lens=self.seq_lens,
            seq_lens_host=self.lens,
            page_size=self.page_size,
            window=window,
            is_chunked=is_chunked,
        )

    def extends(
        self,
        query_lens: list[int],
        block_size: int = 1,
        window: int = 0,
        *,
        is_chunked: bool = False,
        is_bidirectional: bool = False,
    ) -> AttentionMetadata:
        starts = torch.tensor([0, *query_lens], device=self.k_cache.device).cumsum(0).int()
        return AttentionMetadata(
            page_table=self.page_table,
            seq_lens=self.seq_lens,
            seq_lens_host=self.lens,
            query_start=starts,
            query_lens_host=query_lens,
            page_size=self.page_size,
            block_size=block_size,
            window=window,
            is_chunked=is_chunked,
            is_bidirectional=is_bidirectional,
        )

    def attend(
        self, q: torch.Tensor, backend: AttentionBackend, metadata: AttentionMetadata
    ) -> torch.Tensor:
        step = backend.plan(metadata)
        return step.forward(
            *(q, self.k_cache, self.v_cache),
            scale=self.scale,
            sinks=self.sinks,
            value_scale=self.value_scale,
        )

    def decode(
        self,
        q: torch.Tensor,
        *,
        batch_invariant: bool = False,
        window: int = 0,
        is_chunked: bool = False,
    ) -> torch.Tensor:
        """Decodes with the backend selected for the cache's device."""
        return self.attend(
            q, self.backend(batch_invariant), self.decodes(window, is_chunked=is_chunked)
        )

    def extend(
        self,
        q: torch.Tensor,
        query_lens: list[int],
        *,
        batch_invariant: bool = False,
        block_size: int = 1,
        window: int = 0,
        is_chunked: bool = False,
        is_bidirectional: bool = False,
    ) -> torch.Tensor:
        """Extends with the backend selected for the cache's device."""
        backend = self.backend(batch_invariant, block_size)
        metadata = self.extends(
            query_lens, block_size, window, is_chunked=is_chunked, is_bidirectional=is_bidirectional
        )
        return self.attend(q, backend, metadata)

    def backend(self, batch_invariant: bool = False, block_size: int = 1) -> AttentionBackend:
        """The backend selected for the cache's device."""
        settings = AttentionSettings(
            device=self.k_cache.device,
            dtype=self.k_cache.dtype,
            page_size=self.page_size,
            batch_invariant=batch_invariant,
            block_size=block_size,
            cap=self.cap,
            has_sinks=self.sinks is not None,
            has_latents=has_latents(self.k_cache, self.v_cache),
            most_decodes=len(self.lens),
            num_heads=MOST_HEADS,
            has_fp8_cache=self.k_cache.dtype == torch.float8_e4m3fn,
        )
        return create_attention_backend("auto", settings)


def make_paged(
    lens: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    cap: float = 0.0,
    value_dim: int = 0,
    own_value_dim: int = 0,
) -> Paged:
    """A random cache. With `value_dim`, values are this number of leading dimensions of the keys.
    With `own_value_dim`, they have a separate cache with this number of dimensions."""
    columns = max(1, -(-max(lens) // page_size))
    num_pages = len(lens) * columns + 1
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    # Page 0 is the dummy page: rows end in it.
    table = (torch.randperm(num_pages - 1) + 1).view(len(lens), columns).int()
    for row, length in enumerate(lens):
        table[row, -(-length // page_size) :] = 0
    k_cache = torch.randn(shape).to(device, dtype)
    v_cache = torch.randn(*shape[:3], own_value_dim or head_dim).to(device, dtype)
    return Paged(
        lens=lens,
        k_cache=k_cache,
        v_cache=k_cache[..., :value_dim] if value_dim else v_cache,
        page_table=table.to(device),
        scale=head_dim**-0.5,
        cap=cap,
    )


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    block_size: int = 1,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    is_chunked: bool = False,
) -> torch.Tensor:
    """Queries q [t, Hq, D] at the end of k, v [l, Hkv, D] attend to their whole block, or to a
    window up to their own position, or to their chunk, optionally with soft cap and sinks [Hq];
    fp64."""
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, 1)
    values = v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) * scale
    scores = cap * (scores / cap).tanh() if cap else scores
    own = torch.arange(q.shape[0]) + k.shape[0] - q.shape[0]
    blocks = torch.arange(k.shape[0]) // block_size
    hidden = (blocks[None, :] > own[:, None] // block_size).to(q.device)
    if window:
        starts = own // window * window if is_chunked else own - window + 1
        hidden |= (torch.arange(k.shape[0])[None, :] < starts[:, None]).to(q.device)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        own_sinks = sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, own_sinks), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("htl,lhd->thd", weights, values)


def naive_bidirectional(
    case: Paged, q: torch.Tensor, query_lens: list[int], window: int = 0
) -> torch.Tensor:
    """Each query attends as a decode at the end of its row."""
    parts = [
        naive_attention(
            query.unsqueeze(0),
            *(case.row(case.k_cache, row), case.row(case.v_cache, row), case.scale),
            window=window,
        )
        for row, part in enumerate(q.split(query_lens))
        for query in part
    ]
    return torch.cat(parts)


def naive_decode(
    case: Paged, q: torch.Tensor, window: int = 0, *, is_chunked: bool = False
) -> torch.Tensor:
    return naive_extend(case, q, [1] * len(case.lens), window=window, is_chunked=is_chunked)


def naive_extend(
    case: Paged,
    q: torch.Tensor,
    query_lens: list[int],
    block_size: int = 1,
    window: int = 0,
    *,
    is_chunked: bool = False,
) -> torch.Tensor:
    parts = [
        naive_attention(
            part,
            case.row(case.k_cache, i),
            case.row(case.v_cache, i),
            case.scale,
            block_size,
            window,
            case.cap,
            case.sinks,
            is_chunked,
        )
        for i, part in enumerate(q.split(query_lens))
    ]
    return torch.cat(parts)
