"""FlashAttention over paged caches: version 3 where it is installed, else version 2.

Both read the page table as it is. Version 2 wants pages of a multiple of 256 tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_PAGE_MULTIPLE = 256


def find_flash_attention(page_size: int) -> FlashAttention | None:
    """The newest version that is installed; None without any.

    Raises:
        ValueError: only version 2 is there and the pages do not suit it.
    """
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return FlashAttention(importlib.import_module("flash_attn_interface"), version=3)
    if importlib.util.find_spec("flash_attn") is None:
        return None
    if page_size % _PAGE_MULTIPLE:
        raise ValueError(
            f"--attention-backend flash: FlashAttention 2 reads pages of a multiple of "
            f"{_PAGE_MULTIPLE} tokens, not {page_size}; set --page-size {_PAGE_MULTIPLE}, or "
            "install FlashAttention 3"
        )
    return FlashAttention(importlib.import_module("flash_attn"), version=2)


class FlashAttention:
    """Calls without a plan: each takes lengths and pages from the device.

    Args:
        module: `flash_attn_interface` (version 3) or `flash_attn` (version 2).
        version: which of them.
    """

    def __init__(self, module: Any, *, version: int) -> None:
        self._module = module
        self._version = version

    def plan_decode(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        page_size: int,
    ) -> _Decode:
        """One query per row."""
        pages = "page_table" if self._version == 3 else "block_table"
        call = partial(
            self._module.flash_attn_with_kvcache,
            cache_seqlens=seq_lens,
            causal=True,
            **{pages: page_table},
        )
        return _Decode(call)

    def plan_extend(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        query_lens_host: Sequence[int],
        page_size: int,
    ) -> _Extend:
        """Ragged queries; the mask is aligned at the rows' ends."""
        longest_query = max(query_lens_host)
        if self._version == 3:
            call = partial(
                self._module.flash_attn_with_kvcache,
                cache_seqlens=seq_lens,
                page_table=page_table,
                cu_seqlens_q=query_start,
                max_seqlen_q=longest_query,
                causal=True,
            )
            return _Extend(call)
        key_start = torch.zeros_like(query_start)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=key_start[1:])
        call = partial(
            self._module.flash_attn_varlen_func,
            cu_seqlens_q=query_start,
            cu_seqlens_k=key_start,
            max_seqlen_q=longest_query,
            max_seqlen_k=max(seq_lens_host),
            block_table=page_table,
            causal=True,
        )
        return _Extend(call)


@dataclass(frozen=True, slots=True)
class _Decode:
    call: partial[torch.Tensor]

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return self.call(q.unsqueeze(1), k_cache, v_cache, softmax_scale=scale).squeeze(1)


@dataclass(frozen=True, slots=True)
class _Extend:
    call: partial[torch.Tensor]

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return self.call(q, k_cache, v_cache, softmax_scale=scale)
