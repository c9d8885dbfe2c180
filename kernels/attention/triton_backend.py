"""Triton backend, whose kernels read lengths and pages only on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from kernels.attention.base import AttentionMetadata, AttentionSettings, CapturableBackend
from kernels.attention.triton_config import (
    INVARIANT_SPLIT_TOKENS,
    MAX_HEAD_DIM,
    MAX_INVARIANT_PARTIALS,
    MAX_INVARIANT_SPLITS,
    decode_blocks,
    extend_blocks,
)
from kernels.attention.triton_kernel import attend
from kernels.attention.triton_latent import attend_to_latents, count_arrivals
from kernels.attention.triton_schedule import AttentionRows, Schedule, make_schedule
from kernels.attention.values import has_latents
from kernels.registry import registry
from kernels.tiles import next_power_of_2


def create(settings: AttentionSettings) -> TritonAttention:
    """Creates the backend.

    Raises:
        ValueError: Triton is not enabled for the device, batch-invariant attention over latents is
            requested, or heads are too large for a program.
    """
    if not registry.uses_triton(settings.device):
        raise ValueError("--attention-backend triton needs a CUDA device: use auto or torch")
    if settings.has_latents and settings.batch_invariant:
        raise ValueError(
            "--batch-invariant is not supported on CUDA for models with MLA: remove it"
        )
    if not settings.has_latents and max(settings.head_dims, default=0) > MAX_HEAD_DIM:
        raise ValueError(
            f"--attention-backend triton supports head sizes up to {MAX_HEAD_DIM}, but this "
            f"model's is {max(settings.head_dims)}: use torch"
        )
    arrived = None
    if settings.has_latents:
        sizes = settings.most_decodes, settings.num_heads
        arrived = count_arrivals(*sizes, settings.device)
    return TritonAttention(
        batch_invariant=settings.batch_invariant, cap=settings.cap, arrived=arrived
    )


class TritonAttention(CapturableBackend):
    """Attention by Triton kernels: one for decodes and extends, with split keys, and one for
    latents.

    Lengths on the host may be upper bounds: they only determine the number of programs, which is
    fixed in a captured step. The work of each program is determined on the device.

    Args:
        batch_invariant: whether each query is computed as a decode, in splits that depend only on
            its own keys.
        cap: soft cap of scores, as in AttentionSettings.
        arrived: counters from `count_arrivals`, for attention to latents; otherwise None. Steps
            share them, since they run one after another.
    """

    needs_exact_lengths = False

    def __init__(
        self,
        *,
        batch_invariant: bool = False,
        cap: float = 0.0,
        arrived: torch.Tensor | None = None,
    ) -> None:
        self._batch_invariant, self._cap, self._arrived = batch_invariant, cap, arrived
        # Upper bounds would add programs: to batch-invariant attention for the maximum number of
        # keys of each query, to attention to latents for the maximum number of queries of each row.
        self.captures_ragged = not batch_invariant and arrived is None

    def plan(self, metadata: AttentionMetadata) -> _Step:
        """Plans a step. Batch-invariant extends become decodes, one per query."""
        if metadata.query_start is not None and self._batch_invariant:
            rows = _query_rows(metadata, metadata.query_start)
        else:
            rows = AttentionRows(
                page_table=metadata.page_table,
                seq_lens=metadata.seq_lens,
                query_start=metadata.query_start,
                window=metadata.window,
                is_chunked=metadata.is_chunked,
                block_size=metadata.block_size,
                is_bidirectional=metadata.is_bidirectional,
            )
        return _Step(metadata, rows, self._batch_invariant, self._cap, self._arrived)


@dataclass(slots=True)
class _Step:
    metadata: AttentionMetadata
    rows: AttentionRows
    batch_invariant: bool
    cap: float
    arrived: torch.Tensor | None
    """The backend's counters for attention to latents; otherwise None."""
    pieces: list[tuple[slice, Schedule]] = field(default_factory=list)
    """Slices of queries with their schedules, created in the first layer, when the number of heads
    is known, and shared by all layers."""

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
        value_dim = v_cache.shape[3]
        if has_latents(k_cache, v_cache):
            assert self.arrived is not None, "the settings must specify latents"
            return attend_to_latents(
                q, k_cache, value_dim, self.metadata, scale, self.arrived, value_scale
            )
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        if not self.pieces and q.shape[0]:
            is_fp8 = k_cache.dtype != q.dtype
            self.pieces = self._schedules(q, k_cache.shape[2], is_fp8=is_fp8)
        for part, schedule in self.pieces:
            attend(
                *(q[part], k_cache, v_cache, out[part], schedule),
                scale=scale,
                cap=self.cap,
                sinks=sinks,
                value_scale=value_scale,
            )
        return out

    def _schedules(
        self, q: torch.Tensor, num_kv_heads: int, *, is_fp8: bool = False
    ) -> list[tuple[slice, Schedule]]:
        """Schedules of a step: one or, in batch-invariant mode, several if the partial outputs of
        all queries would take too much memory."""
        num_queries, num_q_heads, head_dim = q.shape
        group = next_power_of_2(num_q_heads // num_kv_heads)
        rows, query_lens = self.rows, self.metadata.query_lens_host
        queries, num_tiles = 1, num_queries
        if rows.query_start is None:
            blocks = decode_blocks(head_dim, q.dtype, group, is_fp8=is_fp8)
        else:
            num_rows = rows.seq_lens.shape[0]
            blocks = extend_blocks(head_dim, q.dtype, group, num_queries / num_rows)
            queries = blocks.rows // group
            if query_lens:
                num_tiles = sum(-(-length // queries) for length in query_lens)
            else:  # an upper bound: each row's last tile may have only one query
                num_tiles = min(num_queries, (num_queries + num_rows * (queries - 1)) // queries)
        most_visible = self.metadata.max_seq_len
        if rows.window:
            most_visible = min(most_visible, rows.window + queries - 1)
        make = partial(
            make_schedule,
            blocks=blocks,
            queries=queries,
            most_visible=most_visible,
            num_kv_heads=num_kv_heads,
            batch_invariant=self.batch_invariant,
        )
        if not self.batch_invariant:
            return [(slice(num_queries), make(rows, num_tiles=num_tiles))]
        splits = min(MAX_INVARIANT_SPLITS, -(-most_visible // INVARIANT_SPLIT_TOKENS))
        step = max(1, MAX_INVARIANT_PARTIALS // max(1, splits))
        parts = (
            slice(start, min(start + step, num_queries)) for start in range(0, num_queries, step)
        )
        return [(part, make(rows.part(part), num_tiles=part.stop - part.start)) for part in parts]


def _query_rows(metadata: AttentionMetadata, query_start: torch.Tensor) -> AttentionRows:
    """Rows in which each query of an extend is a decode: its row of the page table, and its number
    of visible positions. Does not wait for the device."""
    seq_lens, ends = metadata.seq_lens, query_start[1:]
    num_queries = sum(metadata.query_lens_host)
    rows = torch.repeat_interleave(
        torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device),
        ends - query_start[:-1],
        output_size=num_queries,
    )
    # Counted backwards from the row's end, which is that of its last query.
    index = torch.arange(num_queries, dtype=torch.int32, device=seq_lens.device)
    position = index - (ends - seq_lens).index_select(0, rows)
    visible_lens = (position // metadata.block_size + 1) * metadata.block_size
    if metadata.is_bidirectional:
        visible_lens = seq_lens.index_select(0, rows)
    return AttentionRows(
        page_table=metadata.page_table,
        seq_lens=visible_lens,
        query_start=None,
        page_rows=rows,
        window=metadata.window,
        is_chunked=metadata.is_chunked,
    )
