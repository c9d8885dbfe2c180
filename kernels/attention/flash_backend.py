"""FlashAttention backend: version 3 if installed, else version 2.

Both read the page table directly. Version 2 needs a page size that is a multiple of 256.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.attention.base import AttentionMetadata, AttentionSettings, CapturableBackend

_PAGE_MULTIPLE = 256


def create(settings: AttentionSettings) -> FlashAttention:
    """Creates the backend, with the newest installed version.

    Raises:
        ValueError: FlashAttention is not installed, or does not support the settings.
    """
    settings.check_library("flash")
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return FlashAttention(importlib.import_module("flash_attn_interface"), version=3)
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "--attention-backend flash: FlashAttention is not installed. Run `pip install "
            "flash-attn` (and set --page-size 256), install FlashAttention 3, or use auto"
        )
    if settings.page_size % _PAGE_MULTIPLE:
        raise ValueError(
            f"--page-size {settings.page_size}: FlashAttention 2 needs a multiple of "
            f"{_PAGE_MULTIPLE}. Set --page-size {_PAGE_MULTIPLE}, or install FlashAttention 3"
        )
    return FlashAttention(importlib.import_module("flash_attn"), version=2)


class FlashAttention(CapturableBackend):
    """Attention by calls of the library. Calls for decodes only read lengths and pages on the
    device, so graphs replay them without an update; those for extends also need the maximum queries
    of a row on the host.

    Args:
        module: `flash_attn_interface` (version 3) or `flash_attn` (version 2).
        version: 3 or 2.
    """

    def __init__(self, module: Any, *, version: int) -> None:
        self._module = module
        self._version = version

    def plan(self, metadata: AttentionMetadata) -> _Step:
        """Binds the arguments of the library's call."""
        rows = metadata
        pages = "page_table" if self._version == 3 else "block_table"
        options = {pages: rows.page_table, "causal": True}
        if rows.query_start is None:
            call = partial(
                self._module.flash_attn_with_kvcache, cache_seqlens=rows.seq_lens, **options
            )
            return _Step(call, is_decode=True)
        longest_query = max(rows.query_lens_host)
        if self._version == 3:
            call = partial(
                self._module.flash_attn_with_kvcache,
                cache_seqlens=rows.seq_lens,
                cu_seqlens_q=rows.query_start,
                max_seqlen_q=longest_query,
                **options,
            )
            return _Step(call, is_decode=False)
        key_start = torch.zeros_like(rows.query_start)
        torch.cumsum(rows.seq_lens, 0, dtype=torch.int32, out=key_start[1:])
        call = partial(
            self._module.flash_attn_varlen_func,
            cu_seqlens_q=rows.query_start,
            cu_seqlens_k=key_start,
            max_seqlen_q=longest_query,
            max_seqlen_k=rows.max_seq_len,
            **options,
        )
        return _Step(call, is_decode=False)

    def prepare_for_capture(self, metadata: AttentionMetadata) -> _Step:
        """Plans a decode for a capture; extends are not captured."""
        assert metadata.query_start is None, "only decodes are captured"
        return self.plan(metadata)


@dataclass(frozen=True, slots=True)
class _Step:
    call: partial[torch.Tensor]
    is_decode: bool

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
        if self.is_decode:
            return self.call(q.unsqueeze(1), k_cache, v_cache, softmax_scale=scale).squeeze(1)
        return self.call(q, k_cache, v_cache, softmax_scale=scale)
