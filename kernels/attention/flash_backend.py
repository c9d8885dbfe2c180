"""FlashAttention 4 for rows with many queries, and Triton for all others.

The library's kernels for Hopper and Blackwell read page tables and lengths on the device. They do
not split the keys of a row, so rows with few queries run on Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention import triton_backend
from kernels.attention.base import (
    AttentionMetadata,
    AttentionSettings,
    AttentionStep,
    CapturableBackend,
)
from kernels.attention.split import SplitExtends, split_extends

MIN_QUERIES = 1024
"""Minimum number of queries for which a row runs on FlashAttention. A row of this length fills an
H100 by itself, with eight tiles of 128 queries for each of 16 or more heads."""
_HEAD_DIMS = {
    9: "up to 256 and multiples of 8",
    10: "up to 128 and multiples of 8, 192 with values of 128, or 256",
}
"""Supported head sizes by major compute capability (`_validate_head_dims` of flash-attn-4)."""

Attend = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
"""`flash_attn.cute.flash_attn_varlen_func`."""


def create(settings: AttentionSettings) -> FlashAttention:
    """Creates the backend.

    Raises:
        ValueError: FlashAttention 4 is not installed, or does not support the settings.
    """
    _check(settings)
    try:
        library = importlib.import_module("flash_attn.cute")
    except ImportError as error:
        raise ValueError(
            "--attention-backend flash: FlashAttention 4 is not installed "
            f"({error}). Run `pip install 'rayfleet[gpu]'`, or use auto"
        ) from error
    others = triton_backend.create(settings)
    return FlashAttention(library.flash_attn_varlen_func, others, cap=settings.cap)


def _check(settings: AttentionSettings) -> None:
    """Raises ValueError if the library or this backend does not support the settings."""
    option = "--attention-backend flash"
    if settings.batch_invariant:
        raise ValueError(f"{option} is not batch-invariant: use auto or triton")
    if settings.block_size > 1:
        raise ValueError(f"{option} supports causal attention only: use auto")
    if settings.has_bidirectional_rows:
        raise ValueError(f"{option} does not support models with canvases: use auto")
    if settings.has_latents:
        raise ValueError(f"{option} does not support MLA: use auto")
    if settings.has_fp8_cache:
        raise ValueError(f"{option} does not support --kv-cache-dtype fp8: use auto or triton")
    if settings.device.type != "cuda":
        raise ValueError(f"{option} needs a CUDA device: use auto or torch")
    if settings.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"{option} supports float16 and bfloat16, not {settings.dtype}: use auto, or set "
            "--dtype"
        )
    major, minor = torch.cuda.get_device_capability(settings.device)
    if major not in _HEAD_DIMS:
        raise ValueError(
            f"{option} needs a GPU with compute capability 9.x or 10.x (Hopper or Blackwell), but "
            f"this GPU has {major}.{minor}: use auto"
        )
    if not all(_is_supported(size, settings, major) for size in settings.head_dims):
        sizes = " and ".join(map(str, settings.head_dims))
        raise ValueError(
            f"{option} needs head sizes {_HEAD_DIMS[major]} on this GPU, but this model has "
            f"{sizes}: use auto"
        )


def _is_supported(head_dim: int, settings: AttentionSettings, major: int) -> bool:
    if head_dim % 8:
        return False
    if major == 9 or head_dim <= 128:
        return head_dim <= 256
    return head_dim == (192 if settings.has_narrow_values else 256)


class FlashAttention(CapturableBackend):
    """FlashAttention 4 for extends with at least `MIN_QUERIES` queries, otherwise Triton.

    Triton runs shorter rows, chunked attention, and all rows of steps captured in CUDA graphs.

    Args:
        attend: the library's function.
        others: Triton backend for all other rows; must read lengths on the device.
        cap: soft cap of scores, as in AttentionSettings.
    """

    needs_exact_lengths = False

    def __init__(self, attend: Attend, others: CapturableBackend, *, cap: float = 0.0) -> None:
        self._attend, self._others, self._cap = attend, others, cap
        self.captures_ragged = others.captures_ragged

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        """Plans rows with at least `MIN_QUERIES` queries for the library, and others for Triton."""
        is_long = [length >= MIN_QUERIES for length in metadata.query_lens_host]
        if metadata.is_chunked or metadata.query_start is None or not any(is_long):
            return self._others.plan(metadata)
        rows = split_extends(metadata, is_long)
        assert rows is not None, "some rows are long"
        return _Step(
            attend=self._attend,
            split=rows,
            others=None if rows.others is None else self._others.plan(rows.others),
            cap=self._cap,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    attend: Attend
    split: SplitExtends
    """The step's extends, split into rows with at least `MIN_QUERIES` queries and all others."""
    others: AttentionStep | None
    """Planned attention of the other rows; None if there are none."""
    cap: float

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
        """Computes the rows of both backends separately; arguments as in AttentionStep."""
        assert value_scale == 1.0, "FP8 caches are rejected when the backend is created"
        tokens, other_tokens = self.split.tokens, self.split.other_tokens
        if self.others is None or tokens is None or other_tokens is None:
            return self._attend_long(q, k_cache, v_cache, scale, sinks)
        found = self._attend_long(q.index_select(0, tokens), k_cache, v_cache, scale, sinks)
        rest = self.others.forward(
            q.index_select(0, other_tokens), k_cache, v_cache, scale=scale, sinks=sinks
        )
        out = found.new_empty(len(q), *found.shape[1:])
        out.index_copy_(0, tokens, found)
        return out.index_copy_(0, other_tokens, rest)

    def _attend_long(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = self.split.selected
        found = self.attend(
            *(q, k_cache, v_cache),
            cu_seqlens_q=rows.query_start,
            seqused_k=rows.seq_lens,
            max_seqlen_q=max(rows.query_lens_host),
            max_seqlen_k=rows.max_seq_len,
            page_table=rows.page_table,
            softmax_scale=scale,
            causal=True,
            # Numbers of keys before and after the query's own position.
            window_size=(rows.window - 1, 0) if rows.window else (None, None),
            learnable_sink=sinks,
            softcap=self.cap,
        )
        return found[0] if isinstance(found, tuple) else found
