"""FlashInfer's paged attention (docs.flashinfer.ai: BatchDecode-/BatchPrefillWithPagedKVCache).

Its planner wants row lengths on the host and page numbers on the device, both without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

_WORKSPACE_BYTES = 128 << 20
"""What its documentation recommends for the partial results of split rows."""


class FlashInferAttention:
    """One wrapper for decodes and one for extends: a mixed step plans both.

    Args:
        flashinfer: the imported package.
        device: where the caches lie.
    """

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        workspaces = [
            torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspaces[0], "NHD", use_tensor_cores=True
        )
        self._extend = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspaces[1], "NHD")

    def begin_decode(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        page_size: int,
    ) -> _Step:
        """Planned by the first layer, which knows the heads."""
        rows = _PagedRows.of(page_table, seq_lens_host, page_size)
        return _Step(self._decode, None, rows, page_size)

    def begin_extend(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        query_lens_host: Sequence[int],
        page_size: int,
    ) -> _Step:
        """Planned by the first layer, which knows the heads."""
        rows = _PagedRows.of(page_table, seq_lens_host, page_size)
        queries = torch.tensor([0, *accumulate(query_lens_host)], dtype=torch.int32)
        return _Step(self._extend, queries, rows, page_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PagedRows:
    """Rows of pages one after another, without padding."""

    indptr: torch.Tensor
    """[B + 1] int32, host."""
    indices: torch.Tensor
    """[all pages] int32, device."""
    last_page_len: torch.Tensor
    """[B] int32, host."""

    @staticmethod
    def of(page_table: torch.Tensor, seq_lens: Sequence[int], page_size: int) -> _PagedRows:
        # A row of length 0 (padding) reads one position, as elsewhere.
        lengths = torch.tensor(seq_lens, dtype=torch.int32).clamp_(min=1)
        pages = (lengths + page_size - 1) // page_size
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
        # Cells of the flat table, from lengths that the host knows: nothing waits for the device.
        shift = torch.arange(len(lengths)) * page_table.shape[1] - indptr[:-1]
        cells = torch.arange(int(indptr[-1])) + shift.repeat_interleave(pages)
        if page_table.is_cuda:
            cells = cells.pin_memory().to(page_table.device, non_blocking=True)
        return _PagedRows(
            indptr=indptr,
            indices=page_table.reshape(-1).index_select(0, cells),
            last_page_len=lengths - (pages - 1) * page_size,
        )


class _Step:
    def __init__(
        self, wrapper: Any, query_start: torch.Tensor | None, rows: _PagedRows, page_size: int
    ) -> None:
        self._wrapper = wrapper
        self._query_start = query_start
        self._rows = rows
        self._page_size = page_size
        self._is_planned = False

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if not self._is_planned:
            self._plan(q, k_cache, scale)
        out: torch.Tensor = self._wrapper.run(q.contiguous(), (k_cache, v_cache))
        return out

    def _plan(self, q: torch.Tensor, k_cache: torch.Tensor, scale: float) -> None:
        rows = (self._rows.indptr, self._rows.indices, self._rows.last_page_len)
        shape = (q.shape[1], k_cache.shape[2], q.shape[2], self._page_size)
        options = {"sm_scale": scale, "q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
        if self._query_start is None:
            self._wrapper.plan(*rows, *shape, **options)
        else:
            self._wrapper.plan(self._query_start, *rows, *shape, causal=True, **options)
        self._is_planned = True
