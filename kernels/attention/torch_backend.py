"""The torch reference where kernels would run otherwise: to compare, not to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention import reference
from kernels.attention.metadata import (
    DecodeMetadata,
    ExtendMetadata,
    prepare_decode,
    prepare_extend,
)
from kernels.registry import registry


class TorchAttention:
    """Plans and attends as on CPU."""

    def plan_decode(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        page_size: int,
    ) -> _Step:
        """Groups rows by length."""
        with registry.using("torch"):
            metadata = prepare_decode(
                page_table, seq_lens, seq_lens_host=seq_lens_host, page_size=page_size
            )
        return _Step(metadata)

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
        """Cuts rows into pieces."""
        with registry.using("torch"):
            metadata = prepare_extend(
                page_table,
                seq_lens,
                query_start,
                seq_lens_host=seq_lens_host,
                query_lens_host=query_lens_host,
                page_size=page_size,
            )
        return _Step(metadata)


@dataclass(frozen=True, slots=True)
class _Step:
    metadata: DecodeMetadata | ExtendMetadata

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if isinstance(self.metadata, DecodeMetadata):
            return reference.decode_attention(q, k_cache, v_cache, self.metadata, scale)
        return reference.extend_attention(q, k_cache, v_cache, self.metadata, scale)
