"""What attention by other libraries has to offer, so that a step can use it like the ops here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

AttentionBackend = Literal["auto", "triton", "flashinfer", "flash", "torch"]


class AttentionStep(Protocol):
    """The attention of one step, the same for every layer."""

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Arguments and result as for `decode_attention` and `extend_attention`."""
        ...


class AttentionLibrary(Protocol):
    """Begins steps. The lengths on the host must be exact: libraries plan by them."""

    def begin_decode(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        page_size: int,
    ) -> AttentionStep:
        """As `prepare_decode`."""
        ...

    def begin_extend(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        query_lens_host: Sequence[int],
        page_size: int,
    ) -> AttentionStep:
        """As `prepare_extend`."""
        ...
