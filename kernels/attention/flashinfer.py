"""FlashInfer's paged attention (docs.flashinfer.ai: BatchDecode-/BatchPrefillWithPagedKVCache).

Its planner wants row lengths on the host and page numbers on the device, both without padding. For
CUDA graphs there is a wrapper for each number of rows, whose own buffers the plans go into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

_WORKSPACE_BYTES = 128 << 20
"""What its documentation recommends for the partial results of split rows."""


class FlashInferAttention:
    """One wrapper for eager decodes and one for extends, since a mixed step plans both, and one for
    each number of rows that is captured.

    Args:
        flashinfer: the imported package.
        device: where the caches lie.
    """

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        self._flashinfer = flashinfer
        workspaces = [
            torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspaces[0], "NHD", use_tensor_cores=True
        )
        self._extend = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspaces[1], "NHD")
        self._decode_workspace = workspaces[0]
        self._captured: dict[int, _CapturedStep] = {}
        """By number of rows."""

    def plan_decode(
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

    def plan_extend(
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

    def prepare_for_capture(self, page_table: torch.Tensor, *, page_size: int) -> _CapturedStep:
        """Steps run one after another, so that all wrappers share one workspace."""
        num_rows, width = page_table.shape
        step = self._captured.get(num_rows)
        if step is None:
            sizes, device = (num_rows + 1, num_rows * width, num_rows), page_table.device
            indptr, indices, last_page_len = (
                torch.zeros(size, dtype=torch.int32, device=device) for size in sizes
            )
            wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._decode_workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
            rows = _PagedRows.of(torch.zeros_like(page_table), [1] * num_rows, page_size)
            step = self._captured[num_rows] = _CapturedStep(wrapper, None, rows, page_size)
        return step

    def prepare_for_replay(
        self, page_table: torch.Tensor, *, seq_lens_host: Sequence[int], page_size: int
    ) -> None:
        """Its planner copies the rows into the wrapper's buffers."""
        rows = _PagedRows.of(page_table, seq_lens_host, page_size)
        self._captured[page_table.shape[0]].plan_again(rows)


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
        self._plan_arguments: tuple[tuple[int, ...], Mapping[str, Any]] | None = None
        """Shape and options, once a layer has attended."""

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if not self._is_planned:
            shape = (q.shape[1], k_cache.shape[2], q.shape[2], self._page_size)
            options = {"sm_scale": scale, "q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
            self._plan_arguments = shape, options
            self._plan(shape, options)
        out: torch.Tensor = self._wrapper.run(q.contiguous(), (k_cache, v_cache))
        return out

    def _plan(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
        rows = (self._rows.indptr, self._rows.indices, self._rows.last_page_len)
        if self._query_start is None:
            self._wrapper.plan(*rows, *shape, **options)
        else:
            self._wrapper.plan(self._query_start, *rows, *shape, causal=True, **options)
        self._is_planned = True


class _CapturedStep(_Step):
    """A decode step whose launches are captured; remembers what layers look like."""

    def plan_again(self, rows: _PagedRows) -> None:
        """Plans other rows, as many as there were."""
        assert self._plan_arguments is not None, "a step attends before it is replayed"
        self._rows = rows
        self._plan(*self._plan_arguments)
