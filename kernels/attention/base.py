"""The interface of attention: what it takes and what a backend offers. The one place that writes
the signatures down.

eager     plan ──> AttentionStep.forward, layer by layer
captured  prepare_for_capture ──> forward, layer by layer, once for each number of rows
          prepare_for_replay, then the graph, for each step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

_HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    """Settings that a backend is created with."""

    device: torch.device
    """Device of the caches."""
    dtype: torch.dtype
    """Type of queries and caches."""
    page_size: int
    """Tokens of a page."""
    batch_invariant: bool = False
    """Whether a query's bits may depend on its own keys and nothing else."""
    block_size: int = 1
    """Positions of one block see each other; 1 is causal."""
    window: int = 0
    """Positions that the layer sees which sees fewest; 0 where all see all."""
    cap: float = 0.0
    """A product s of query and key, scaled, counts as cap * tanh(s / cap); as s itself where 0."""
    has_sinks: bool = False
    """Whether layers have attention sinks."""
    has_latents: bool = False
    """Whether values are the leading dimensions of keys, which all heads share."""
    most_decodes: int = 0
    """Rows of a decode, at most; where there are latents."""
    num_heads: int = 0
    """Heads of a query, at most; where there are latents."""
    head_dims: tuple[int, ...] = ()
    """Dimensions of keys: more than one number where layers differ."""

    def check_library(self, name: str) -> None:
        """Raises ValueError where causal attention kernels of a library for CUDA do not serve.

        Args:
            name: of the backend.
        """
        option = f"--attention-backend {name}"
        if self.batch_invariant:
            raise ValueError(f"{option} is not batch-invariant; use auto or triton")
        if self.block_size > 1:
            raise ValueError(f"{option} attends causally, this model in blocks: use auto")
        if self.window:
            raise ValueError(
                f"{option} attends to all positions, layers of this model see {self.window}: use "
                f"auto, or set --max-model-len {self.window}"
            )
        if self.cap:
            raise ValueError(f"{option} caps no scores, as this model does: use auto")
        if self.has_sinks:
            raise ValueError(f"{option} knows no attention sinks, which this model has: use auto")
        if self.has_latents:
            raise ValueError(f"{option} attends to no latents, as this model does: use auto")
        if len(self.head_dims) > 1:
            sizes = " and ".join(map(str, self.head_dims))
            raise ValueError(
                f"{option} plans steps for all layers at once, whose heads have {sizes} dimensions "
                "in this model: use auto"
            )
        if self.device.type != "cuda":
            raise ValueError(f"{option} needs a CUDA device; use auto or torch")
        if self.dtype not in _HALF_TYPES:
            raise ValueError(
                f"{option} takes float16 and bfloat16, not {self.dtype}; use auto, or --dtype"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """B rows of one step: decodes, which have one query each, or extends, which have any number.

    Query i of a row stands at position `seq_len - query_len + i` and sees all positions up to the
    end of its block; blocks are counted from 0. With a window it sees the last positions up to its
    own, or those of its chunk: pages of positions that no query of a row sees are not read, but for
    those in one split of keys with such as are seen. The lengths on the host repeat those on the
    device (planning never waits for it).
    """

    page_table: torch.Tensor
    """[B, P] int32: pages in the order of positions; entries past a row's end are valid pages."""
    seq_lens: torch.Tensor
    """[B] int32: tokens in the cache, the new ones included. 0 is padding."""
    seq_lens_host: Sequence[int]
    """[B]. Upper bounds where `AttentionBackend.needs_exact_lengths` is false."""
    query_start: torch.Tensor | None = None
    """[B + 1] int32: where each row's queries begin among all; None of decodes."""
    query_lens_host: Sequence[int] = ()
    """[B]; empty of decodes, and with `num_queries`."""
    num_queries: int = 0
    """Queries of all extends together, where the device alone knows how many each row has, which
    may then be none; else 0."""
    page_size: int
    """Tokens of a page."""
    block_size: int = 1
    """Positions of one block see each other; 1 is causal. Extends begin and end where blocks do."""
    window: int = 0
    """Positions that a query sees, its own included; 0 for all."""
    is_chunked: bool = False
    """Whether a window begins at a multiple of its length: queries see their chunk."""

    def __post_init__(self) -> None:
        assert not (self.window and self.block_size > 1), "windows are of causal rows"
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
            f"rows are to consist of whole blocks of {size}"
        )

    @property
    def max_seq_len(self) -> int:
        """The longest row, or a bound of it."""
        return max(self.seq_lens_host, default=0)

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return max(0, window_start(position, self.window, self.is_chunked)) if self.window else 0


_Positions = TypeVar("_Positions", int, torch.Tensor)


def window_start(positions: _Positions, window: int, is_chunked: bool) -> _Positions:
    """Begins of the windows of queries at `positions`; below 0 where these see all before."""
    return positions // window * window if is_chunked else positions + 1 - window


class AttentionStep(Protocol):
    """A step's planned attention, which all of its layers share."""

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with each query over the pages of its row.

        Query head h reads kv head h // (Hq // Hkv). A row of length 0 yields finite numbers
        without meaning.

        Args:
            q: [T, Hq, D], rows one after another; heads side by side, rows may be strided.
            k_cache: [num_pages, page_size, Hkv, D], the new tokens' keys included. The caches must
                hold finite numbers everywhere, unused slots too: allocate them with zeros.
            v_cache: values, of the same shape; or, of one kv head, the leading dimensions of the
                keys themselves: a view k_cache[..., :Dv].
            scale: factor of the products of queries and keys.
            sinks: [Hq] fp32; a score of each head that takes its share of the weights as a key's
                would, and gives nothing for it.

        Returns:
            [T, Hq, Dv], where Dv is D but for such a view.
        """
        ...


class AttentionBackend(ABC):
    """An implementation of paged attention with grouped query heads."""

    needs_exact_lengths: ClassVar[bool] = True
    """Whether it plans by the lengths on the host; else it reads them on the device, where they
    may follow from what is still being computed."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        """Prepares the attention of a step's rows, before its first layer."""


class CapturableBackend(AttentionBackend):
    """A backend whose steps may be captured in CUDA graphs."""

    captures_ragged: bool = False
    """Whether it captures extends of which the device alone knows how many queries each row has.
    Such steps are replayed as they are, without `prepare_for_replay`."""

    def prepare_for_capture(self, metadata: AttentionMetadata) -> AttentionStep:
        """A step of dummy rows to be captured.

        What it launches reads buffers that stay where they are. Launch it once before the capture:
        kernels are compiled, and some backends plan, when a layer first attends. Any step may be
        captured where a backend says nothing else.

        Args:
            metadata: as wide a page table as any step to come has, and bounds of its lengths.
        """
        return self.plan(metadata)

    def prepare_for_replay(
        self, page_table: torch.Tensor, slots: torch.Tensor, seq_lens: npt.NDArray[np.int64]
    ) -> None:
        """Plans the captured step of B rows anew, outside its graph.

        Where a backend says nothing else, the graph reads all that there is to know on the device.

        Args:
            page_table: [all slots, P] int32, as wide as that of the captured step.
            slots: [B] int64: its rows in this step, padding included.
            seq_lens: [B], on the host, exact.
        """
