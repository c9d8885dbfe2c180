"""Interface of attention backends. Their arguments are documented only here.

eager     plan ──> AttentionStep.forward, layer by layer
captured  prepare_for_capture ──> forward, layer by layer, once for each number of rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    """Properties of a model and an engine that backends depend on."""

    device: torch.device
    """Device of the caches."""
    dtype: torch.dtype
    """Data type of queries, and of caches unless they are FP8."""
    page_size: int
    """Tokens per page."""
    batch_invariant: bool = False
    """Whether a query's result must be bitwise independent of the rest of the batch."""
    block_size: int = 1
    """Number of consecutive positions that attend to each other; 1 for causal attention."""
    window: int = 0
    """Smallest sliding window of any layer; 0 if all layers have full attention."""
    cap: float = 0.0
    """Soft cap of scores: a scaled score s becomes cap * tanh(s / cap); 0 if there is none."""
    has_sinks: bool = False
    """Whether layers have attention sinks."""
    has_latents: bool = False
    """Whether queries attend to latents (MLA): all heads share the keys, whose leading dimensions
    are the values."""
    most_decodes: int = 0
    """Maximum number of rows in a decode step; used only for latents."""
    num_heads: int = 0
    """Maximum number of query heads on a rank; used only for latents."""
    head_dims: tuple[int, ...] = ()
    """Distinct head dimensions of all layers."""
    has_narrow_values: bool = False
    """Whether values have their own cache and fewer dimensions than keys."""
    has_fp8_cache: bool = False
    """Whether caches are FP8 (e4m3)."""
    has_bidirectional_rows: bool = False
    """Whether rows may be bidirectional, as in AttentionMetadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """B rows of one step: decodes, with one query each, or extends, with any number.

    Query i of a row is at position `seq_len - query_len + i` and attends to all positions up to the
    end of its block; blocks are counted from position 0. With a window, it attends to the last
    `window` positions up to its own; if attention is chunked, to the positions of its chunk up to
    its own. Pages without a position that is visible to a row are not read, unless they belong to a
    split of keys with visible positions.
    """

    page_table: torch.Tensor
    """[B, P] int32: page ids in the order of positions; entries past a row's end must be valid."""
    seq_lens: torch.Tensor
    """[B] int32: tokens in the cache, including the new ones; 0 for padding."""
    seq_lens_host: Sequence[int]
    """[B]: copy of `seq_lens` on the host, since planning never waits for the device. Its values
    may be upper bounds if the backend's `needs_exact_lengths` is false."""
    query_start: torch.Tensor | None = None
    """[B + 1] int32: offsets of the rows' queries among all queries; None for decodes."""
    query_lens_host: Sequence[int] = ()
    """[B]: number of queries per row; empty for decodes, and if `num_queries` is set."""
    num_queries: int = 0
    """Total number of queries of all extends if the numbers per row (possibly 0) are known only on
    the device; otherwise 0."""
    page_size: int
    """Tokens per page."""
    block_size: int = 1
    """Number of consecutive positions that attend to each other; 1 for causal attention. Extends
    consist of whole blocks."""
    window: int = 0
    """Sliding window: number of positions that a query attends to, including its own; 0 for full
    attention."""
    is_chunked: bool = False
    """Whether attention is chunked: windows begin at multiples of their length."""
    is_bidirectional: bool = False
    """Whether every query of an extend attends to the same positions as its row's last query, and
    so to all queries of the row."""

    def __post_init__(self) -> None:
        assert not (self.window and self.block_size > 1), "sliding windows require causal attention"
        rows, columns = self.page_table.shape
        assert rows == len(self.seq_lens_host), f"{rows} page rows, {len(self.seq_lens_host)} rows"
        room = columns * self.page_size
        assert room >= self.max_seq_len, f"{room} tokens in a page row, {self.max_seq_len} needed"
        if self.query_start is None or self.num_queries:
            return
        lengths = list(zip(self.query_lens_host, self.seq_lens_host, strict=True))
        assert all(0 < query <= seq for query, seq in lengths), (
            "a row extends by at least one token and holds at least its new tokens"
        )
        size = self.block_size
        assert all(query % size == 0 == seq % size for query, seq in lengths), (
            f"rows must consist of whole blocks of {size}"
        )

    @property
    def max_seq_len(self) -> int:
        """Length of the longest row, or an upper bound."""
        return max(self.seq_lens_host, default=0)

    def first_visible(self, position: int) -> int:
        """First position that a query at `position` attends to."""
        return max(0, window_start(position, self.window, self.is_chunked)) if self.window else 0


_Positions = TypeVar("_Positions", int, torch.Tensor)


def window_start(positions: _Positions, window: int, is_chunked: bool) -> _Positions:
    """First positions of the windows of queries at `positions`; below 0 if a window would begin
    before position 0."""
    return positions // window * window if is_chunked else positions + 1 - window


class AttentionStep(Protocol):
    """Planned attention of a step, which all layers share."""

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
        """Computes the attention of each query over the pages of its row.

        Query head h reads KV head h // (Hq // Hkv). Results of rows of length 0 are finite, but
        meaningless.

        Args:
            q: [T, Hq, D], row after row; heads are contiguous, rows may be strided.
            k_cache: [num_pages, page_size, Hkv, D], including the new tokens' keys, in the dtype of
                q or in FP8. The caches must hold finite numbers everywhere, even in unused slots:
                allocate them with zeros.
            v_cache: values [num_pages, page_size, Hkv, Dv], where Dv is at most D; or, for latents
                with one KV head, the leading dimensions of the keys, a view k_cache[..., :Dv].
            scale: scale of scores, including that of keys in an FP8 cache.
            sinks: fp32 [Hq]: a score per head, which enters the softmax like the score of a key
                whose value is 0; None if unused.
            value_scale: scale of values in an FP8 cache, by which the result is multiplied.

        Returns:
            [T, Hq, Dv].
        """
        ...


class AttentionBackend(ABC):
    """An implementation of grouped-query attention with a paged KV cache."""

    needs_exact_lengths: ClassVar[bool] = True
    """Whether planning needs exact lengths on the host. If not, lengths are read on the device and
    may depend on a step in flight."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        """Plans the attention of a step's rows, before its first layer."""


class CapturableBackend(AttentionBackend):
    """A backend whose steps may be captured in CUDA graphs."""

    captures_ragged: bool = False
    """Whether extends with `num_queries`, whose rows' lengths are known only on the device, can be
    captured."""

    def prepare_for_capture(self, metadata: AttentionMetadata) -> AttentionStep:
        """Plans a step of dummy rows for a capture.

        The step's launches read static buffers. The step must run once before the capture: the
        first forward pass of a layer compiles kernels and, in some backends, completes the plan. By
        default, any planned step may be captured.

        Args:
            metadata: dummy rows, with a page table as wide as that of any later step and with upper
                bounds of lengths.
        """
        return self.plan(metadata)
