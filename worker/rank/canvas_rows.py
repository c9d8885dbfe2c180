"""Attention of canvases, whose tokens attend in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import StepTensors
from kernels.attention import AttentionMetadata
from worker.models.layers.kv_cache import KVCacheSpec
from worker.rank.tables import DeviceTables
from worker.rank.transfer import IntArray


def num_known_rows(rows: IntArray, signal: torch.Tensor | None) -> int:
    """Number of the leading rows that are not canvases; arguments as in Batch."""
    num_canvases = 0 if signal is None else len(signal) // int(rows[-1, 2])
    return len(rows) - num_canvases


def canvas_rows(
    rows: IntArray,
    ends: Sequence[int],
    first: int,
    query_start: torch.Tensor,
    num_queries: int,
    step: StepTensors,
    tables: DeviceTables,
    spec: KVCacheSpec,
) -> AttentionMetadata:
    """Attention metadata of the canvases: row `first` and all later rows.

    Args:
        rows: [R, 4], as in Batch.
        ends: sequence lengths of the rows, as in Batch.
        first: index of the first canvas.
        query_start: [R + 1]: offsets of the rows' tokens.
        num_queries: as in AttentionMetadata.
        step: inputs of the step, for this group of layers.
        tables: the rank's tables.
        spec: KV cache of the layers.
    """
    lengths = rows[first:, 2]
    length, offset = int(lengths[-1]), int(rows[:first, 2].sum())
    return AttentionMetadata(
        page_table=step.page_rows[first:],
        seq_lens=step.seq_lens[first:],
        seq_lens_host=ends[first:],
        query_start=(query_start[first:] - offset if offset else query_start).int(),
        query_lens_host=() if num_queries else lengths.tolist(),
        num_queries=num_queries,
        page_size=tables.page_size,
        block_size=tables.block_size,
        # The window of a canvas is that of its first token; all its tokens attend as its last.
        window=spec.window and spec.window + length - 1,
        is_chunked=spec.is_chunked,
        is_bidirectional=True,
    )
