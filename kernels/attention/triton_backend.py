"""Attention by the Triton kernels here. They read lengths and pages on the device alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention.base import AttentionMetadata, AttentionSettings, CapturableBackend
from kernels.attention.triton_decode import (
    VisibleRows,
    attend_in_fixed_splits,
    attend_in_splits,
)
from kernels.attention.triton_extend import extend_attention
from kernels.attention.triton_latent import attend_to_latents
from kernels.registry import registry


def create(settings: AttentionSettings) -> TritonAttention:
    """The backend. Raises ValueError where ops run no Triton kernels, or where it is to attend to
    latents and be batch-invariant."""
    if not registry.uses_triton(settings.device):
        raise ValueError("--attention-backend triton needs a CUDA device; use auto or torch")
    settings.check_latents()
    return TritonAttention(batch_invariant=settings.batch_invariant, cap=settings.cap)


class TritonAttention(CapturableBackend):
    """Decodes with the keys in splits, extends in blocks of queries.

    Lengths on the host may be bounds: numbers of splits and programs follow from them, which a
    captured step keeps.

    Args:
        batch_invariant: whether each query is computed as a decode, in splits of a fixed length.
        cap: of scores, as `AttentionSettings` has it.
    """

    needs_exact_lengths = False

    def __init__(self, *, batch_invariant: bool = False, cap: float = 0.0) -> None:
        self._batch_invariant, self._cap = batch_invariant, cap

    def plan(self, metadata: AttentionMetadata) -> _Step:
        """Finds what each query sees, of decodes and of extends that are batch-invariant."""
        rows, most_visible = None, metadata.max_seq_len
        if metadata.window:
            most_visible = min(most_visible, metadata.window)
        if metadata.query_start is None:
            rows = VisibleRows(metadata.page_table, metadata.seq_lens, window=metadata.window)
        elif self._batch_invariant:
            rows = _query_rows(metadata, metadata.query_start)
        return _Step(metadata, rows, most_visible, self._batch_invariant, self._cap)

    def prepare_for_capture(self, metadata: AttentionMetadata) -> _Step:
        """A captured step is any other."""
        return self.plan(metadata)

    def prepare_for_replay(
        self, page_table: torch.Tensor, slots: torch.Tensor, seq_lens: npt.NDArray[np.int64]
    ) -> None:
        """The graph reads what there is to know."""


@dataclass(frozen=True, slots=True)
class _Step:
    metadata: AttentionMetadata
    rows: VisibleRows | None
    """None of extends that walk keys without splits."""
    most_visible: int
    """Positions that a query sees, or a bound."""
    batch_invariant: bool
    cap: float

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if v_cache.shape[3] != k_cache.shape[3]:
            return attend_to_latents(q, k_cache, v_cache.shape[3], self.metadata, scale)
        if self.rows is None:
            return extend_attention(q, k_cache, v_cache, self.metadata, scale, self.cap, sinks)
        attend = attend_in_fixed_splits if self.batch_invariant else attend_in_splits
        return attend(q, k_cache, v_cache, self.rows, self.most_visible, scale, self.cap, sinks)


def _query_rows(metadata: AttentionMetadata, query_start: torch.Tensor) -> VisibleRows:
    """Each query's row and number of visible positions, computed without waiting for the device."""
    seq_lens, ends = metadata.seq_lens, query_start[1:]
    num_queries = sum(metadata.query_lens_host)
    rows = torch.repeat_interleave(
        torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device),
        ends - query_start[:-1],
        output_size=num_queries,
    )
    # Counted back from the row's end: its last new token sees the whole row.
    index = torch.arange(num_queries, dtype=torch.int32, device=seq_lens.device)
    position = index - (ends - seq_lens).index_select(0, rows)
    visible_lens = (position // metadata.block_size + 1) * metadata.block_size
    return VisibleRows(metadata.page_table, visible_lens, rows, metadata.window)
