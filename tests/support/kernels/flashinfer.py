"""Fake of FlashInfer 0.6, with its documented signatures, computed by torch."""

from __future__ import annotations

import torch

from tests.support.kernels.paged_cases import Paged, naive_extend


def attend_paged(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    rows: list[tuple[torch.Tensor, int, int]],
) -> torch.Tensor:
    """Rows of (pages, tokens, queries) by the naive reference, causal from the end."""
    page_table = torch.nn.utils.rnn.pad_sequence([pages for pages, _, _ in rows], batch_first=True)
    case = Paged([tokens for _, tokens, _ in rows], *caches, page_table.int(), scale)
    return naive_extend(case, q, [queries for _, _, queries in rows]).to(q.dtype)


class FlashInferWrapper:
    """Plans and runs of flashinfer 0.6."""

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.num_plans = 0
        self._pin_memory_int_workspace_buffer = torch.zeros(4, dtype=torch.uint8)
        self.buffers: list[torch.Tensor] = []
        if use_cuda_graph:
            given = (
                *(paged_kv_indptr_buffer, paged_kv_indices_buffer),
                paged_kv_last_page_len_buffer,
            )
            self.buffers = [buffer for buffer in given if buffer is not None]
            assert len(self.buffers) == 3, "a graph needs all buffers"

    def plan_rows(
        self,
        query_start: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        shape: tuple[int, ...],
        sm_scale: float | None,
    ) -> None:
        assert sm_scale is not None
        assert all(t.dtype == torch.int32 for t in (query_start, indptr, indices, last_page_len))
        assert len(indices) == int(indptr[-1])
        self.num_plans += 1
        self._pin_memory_int_workspace_buffer.fill_(self.num_plans)
        self.shape, self.scale, self.query_start = shape, sm_scale, query_start
        self.planned = [indptr, indices, last_page_len]
        if self.buffers:
            assert len(self.buffers[2]) == len(last_page_len), "a graph has so many rows"
            for buffer, tensor in zip(self.buffers, self.planned, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            self.planned = self.buffers

    def rows(self) -> list[tuple[torch.Tensor, int, int]]:
        """Pages, tokens and queries of each row, from the buffers if there are any."""
        indptr, indices, last_page_len = self.planned
        found = []
        for row, last in enumerate(last_page_len.tolist()):
            pages = indices[indptr[row] : indptr[row + 1]]
            assert 1 <= last <= self.shape[3]
            num_queries = int(self.query_start[row + 1] - self.query_start[row])
            found.append((pages, (len(pages) - 1) * self.shape[3] + last, num_queries))
        return found

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads = (q.shape[1], paged_kv_cache[0].shape[2], q.shape[2], paged_kv_cache[0].shape[1])
        assert heads == self.shape
        return attend_paged(q, paged_kv_cache, self.scale, self.rows())


class FlashInfer:
    class BatchDecodeWithPagedKVCacheWrapper(FlashInferWrapper):
        def plan(
            self,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            sm_scale: float | None = None,
            q_data_type: torch.dtype | str = "float16",
            kv_data_type: torch.dtype | str | None = None,
        ) -> None:
            assert q_data_type == kv_data_type == torch.float32
            shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
            queries = torch.arange(len(indptr), dtype=torch.int32)
            self.plan_rows(queries, indptr, indices, last_page_len, shape, sm_scale)

    class BatchPrefillWithPagedKVCacheWrapper(FlashInferWrapper):
        def plan(
            self,
            qo_indptr: torch.Tensor,
            paged_kv_indptr: torch.Tensor,
            paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: int | None = None,
            custom_mask: torch.Tensor | None = None,
            packed_custom_mask: torch.Tensor | None = None,
            causal: bool = False,
            sm_scale: float | None = None,
            q_data_type: torch.dtype | str = "float16",
            kv_data_type: torch.dtype | str | None = None,
        ) -> None:
            assert causal
            shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
            rows = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            self.plan_rows(qo_indptr, *rows, shape, sm_scale)
