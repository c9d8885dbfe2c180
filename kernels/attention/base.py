"""What attention by other libraries has to offer, so that a step can use it like the ops here.

    eager     plan_decode, plan_extend ──> AttentionStep.attend, layer by layer
    captured  prepare_for_capture ──> attend, layer by layer, once for each number of rows
              prepare_for_replay, then the graph, for each step

The ops here read lengths and pages on the device alone: they need nothing before a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch

AttentionBackendName = Literal["auto", "triton", "flashinfer", "flash", "torch"]


class AttentionStep(Protocol):
    """The attention of one step, the same for every layer."""

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Arguments and result as for `decode_attention` and `extend_attention`."""
        ...


class AttentionBackend(Protocol):
    """Plans steps. The lengths on the host must be exact: libraries plan by them."""

    def plan_decode(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        seq_lens_host: Sequence[int],
        page_size: int,
    ) -> AttentionStep:
        """As `prepare_decode`."""
        ...

    def plan_extend(
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


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """One whose decode steps may be captured in CUDA graphs."""

    def prepare_for_capture(self, page_table: torch.Tensor, *, page_size: int) -> AttentionStep:
        """A decode step of B rows to be captured, on the dummy page.

        What it launches reads buffers that stay where they are. It is planned when it first
        attends: launch it once before the capture.

        Args:
            page_table: [B, P] int32, as wide as that of any step to come.
            page_size: tokens of a page.
        """
        ...

    def prepare_for_replay(
        self, page_table: torch.Tensor, *, seq_lens_host: Sequence[int], page_size: int
    ) -> None:
        """Plans the captured step of B rows anew, outside its graph.

        Args:
            page_table: [B, P] int32 of this step's rows, padding included.
            seq_lens_host: [B], exact.
            page_size: tokens of a page.
        """
        ...
