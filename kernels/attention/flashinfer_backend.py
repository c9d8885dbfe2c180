"""FlashInfer backend (docs.flashinfer.ai: BatchDecode-/BatchPrefillWithPagedKVCacheWrapper).

Its planner needs row lengths on the host and page ids on the device, both without padding. For CUDA
graphs there is one wrapper per number of rows, with static buffers for its plans.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention.base import AttentionMetadata, AttentionSettings, CapturableBackend

_WORKSPACE_BYTES = 128 << 20
"""Bytes of the workspace for partial results of split rows, as FlashInfer's documentation
recommends."""
_PLANS_UNDER_WAY = 4
"""Maximum plans in flight: decodes and extends of two steps."""


def create(settings: AttentionSettings) -> FlashInferAttention:
    """The backend.

    Raises:
        ValueError: FlashInfer is not installed, or does not support the settings.
    """
    settings.check_library("flashinfer")
    if importlib.util.find_spec("flashinfer") is None:
        raise ValueError(
            "--attention-backend flashinfer: FlashInfer is not installed. Run `pip install "
            "flashinfer-python`, or use auto"
        )
    return FlashInferAttention(importlib.import_module("flashinfer"), settings.device)


class FlashInferAttention(CapturableBackend):
    """Attention by FlashInfer's wrappers: one for eager decodes and one for extends, since a mixed
    step plans both, and one for each captured number of rows.

    Args:
        flashinfer: the imported package.
        device: device of the caches.
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
        self._planner = _Planner(device)
        self._captured: dict[int, _CapturedStep] = {}
        """Captured steps by number of rows."""

    def plan(self, metadata: AttentionMetadata) -> _Step:
        """Collects the rows' pages; FlashInfer plans when the first layer attends, since planning
        needs the heads."""
        page_size = metadata.page_size
        lengths = torch.tensor(metadata.seq_lens_host, dtype=torch.int32)
        rows = _PagedRows.of(metadata.page_table, lengths, page_size)
        if metadata.query_start is None:
            return _Step(self._planner, self._decode, None, rows, page_size)
        queries = torch.tensor([0, *accumulate(metadata.query_lens_host)], dtype=torch.int32)
        return _Step(self._planner, self._extend, queries, rows, page_size)

    def prepare_for_capture(self, metadata: AttentionMetadata) -> _CapturedStep:
        """Creates the wrapper for this number of rows. Steps run sequentially, so all wrappers
        share one workspace."""
        assert metadata.query_start is None, "only decodes are captured"
        page_table, page_size = metadata.page_table, metadata.page_size
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
            lengths = torch.ones(num_rows, dtype=torch.int32)
            rows = _PagedRows.of(torch.zeros_like(page_table), lengths, page_size)
            step = _CapturedStep(self._planner, wrapper, None, rows, page_size)
            self._captured[num_rows] = step
        return step

    def prepare_for_replay(
        self, page_table: torch.Tensor, slots: torch.Tensor, seq_lens: npt.NDArray[np.int64]
    ) -> None:
        """Plans the rows anew, which copies them to the wrapper's static buffers."""
        step = self._captured[len(slots)]
        lengths = torch.from_numpy(seq_lens).int()
        step.plan_again(_PagedRows.of(page_table.index_select(0, slots), lengths, step.page_size))


class _Planner:
    """Provides each plan with a pinned buffer until the plan has been copied to the device.

    HAZARD(stream): a wrapper's `plan` writes to its pinned buffer and launches a copy, which runs
    after all earlier launches. It does not check that the previous plan has been copied: a step
    that is launched ahead would overwrite it (sgl-project/mini-sglang#103: illegal memory
    accesses). So all wrappers share a few buffers of this class in turn.

    Args:
        device: device that plans are copied to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places = deque[tuple[torch.Tensor, torch.cuda.Event | None]]()
        """Pinned buffers, least recently used first, each with the event after its copy."""

    def plan(self, wrapper: Any, *rows: Any, **options: Any) -> None:
        """Calls `wrapper.plan`. Waits only if more plans are in flight than two steps have."""
        place = self._free_place(wrapper)
        wrapper._pin_memory_int_workspace_buffer = place
        wrapper.plan(*rows, **options)
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._places.append((place, copied))

    def _free_place(self, wrapper: Any) -> torch.Tensor:
        if len(self._places) < _PLANS_UNDER_WAY:
            own: torch.Tensor = wrapper._pin_memory_int_workspace_buffer
            return torch.empty_like(own, pin_memory=own.is_pinned())
        place, copied = self._places.popleft()
        if copied is not None:
            copied.synchronize()
        return place


@dataclass(frozen=True, kw_only=True, slots=True)
class _PagedRows:
    """Pages of B rows in FlashInfer's form (CSR), without padding."""

    indptr: torch.Tensor
    """[B + 1] int32 on the host: offsets of the rows' pages in `indices`."""
    indices: torch.Tensor
    """[all pages] int32 on the device: page ids."""
    last_page_len: torch.Tensor
    """[B] int32 on the host: number of tokens in each row's last page."""

    @staticmethod
    def of(page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> _PagedRows:
        """Pages of the rows of page_table [B, P] on the device, with lengths [B] int32 on the
        host."""
        # A row of length 0 (padding) reads one position, as in other backends.
        lengths = seq_lens.clamp(min=1)
        pages = (lengths + page_size - 1) // page_size
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
        # Cells of the flat table, from lengths on the host: does not wait for the device.
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
        self,
        planner: _Planner,
        wrapper: Any,
        query_start: torch.Tensor | None,
        rows: _PagedRows,
        page_size: int,
    ) -> None:
        self._planner = planner
        self._wrapper = wrapper
        self._query_start = query_start
        self._rows = rows
        self.page_size = page_size
        self._is_planned = False
        self._plan_arguments: tuple[tuple[int, ...], Mapping[str, Any]] | None = None
        """Heads, head dimension and page size, and options of the plan, once a layer has
        attended."""

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
        assert sinks is None, "rejected when the backend is created"
        assert value_scale == 1.0, "FP8 caches are rejected when the backend is created"
        if not self._is_planned:
            shape = (q.shape[1], k_cache.shape[2], q.shape[2], self.page_size)
            options = {"sm_scale": scale, "q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
            self._plan_arguments = shape, options
            self._plan(shape, options)
        out: torch.Tensor = self._wrapper.run(q.contiguous(), (k_cache, v_cache))
        return out

    def _plan(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> None:
        rows = (self._rows.indptr, self._rows.indices, self._rows.last_page_len)
        if self._query_start is None:
            self._planner.plan(self._wrapper, *rows, *shape, **options)
        else:
            starts = self._query_start
            self._planner.plan(self._wrapper, starts, *rows, *shape, causal=True, **options)
        self._is_planned = True


class _CapturedStep(_Step):
    """A captured decode step, which can be planned again for other rows."""

    def plan_again(self, rows: _PagedRows) -> None:
        """Plans the step for other rows, of the same number, and the same layers."""
        assert self._plan_arguments is not None, "a step must attend before it is replayed"
        self._rows = rows
        self._plan(*self._plan_arguments)
