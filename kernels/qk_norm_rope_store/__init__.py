"""QK norm, rotary embedding (RoPE) and store to the KV cache, in one launch on CUDA."""

from __future__ import annotations

from kernels.qk_norm_rope_store.base import HeadNorms
from kernels.qk_norm_rope_store.reference import qk_norm_rope_store

__all__ = ["HeadNorms", "qk_norm_rope_store"]
