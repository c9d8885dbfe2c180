"""Device tables: the state of all running requests, in one fixed row per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels import write_table_rows_
from worker.plan.plan import Plan
from worker.rank.sampling.state import SamplingState
from worker.rank.transfer import IntArray, Tensors, stage, to_device


class DeviceTables:
    """Token pool and page table on the device, with the sampling state.

    Row `max_num_seqs` is the dummy slot, which is used by padding and by no request. Page 0 is the
    dummy page, so unset entries of the page table are harmless.

    Args:
        max_num_seqs: maximum number of running requests.
        max_model_len: maximum number of tokens of a request.
        page_size: tokens per page.
        vocab_size: number of tokens that can be sampled.
        device: the rank's device.
        native_sampling: whether the compiled CPU library samples tokens.
        block_size: block size of a block-diffusion model; otherwise 1.
        page_factors: number of layers that share one page, by group of layers; page ids in the page
            table are multiplied by this number.
        keeps_states: whether layers keep a state per slot.
        num_replayed: maximum number of tokens that are replayed into the state of a slot: those of
            a draft row; 0 if states are not replayed.
        max_loras: maximum number of LoRA adapters in a batch; 0 if they are disabled.
        adapts_logits: whether the LM head may have adapters.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        vocab_size: int,
        device: torch.device,
        native_sampling: bool = False,
        block_size: int = 1,
        page_factors: Sequence[int] = (1,),
        keeps_states: bool = False,
        num_replayed: int = 0,
        max_loras: int = 0,
        adapts_logits: bool = False,
    ) -> None:
        num_rows = max_num_seqs + 1
        self.device = device
        self.native_sampling = native_sampling
        """Whether the compiled CPU library samples tokens."""
        self.block_size = block_size
        """Number of consecutive positions that attend to each other; 1 for causal attention."""
        self.keeps_states = keeps_states
        """Whether layers keep a state per slot."""
        self.num_replayed = num_replayed
        """Maximum number of tokens that are replayed into the state of a slot."""
        self.adapts_logits = adapts_logits
        """Whether the LM head may have adapters."""
        self.max_loras = max_loras
        """Maximum number of LoRA adapters in a batch; 0 if they are disabled."""
        self.adapters = np.zeros(num_rows, dtype=np.int32) if max_loras else None
        """[slots] on the host: 1-based slot of each request's LoRA adapter, or 0; None if adapters
        are disabled."""
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.dummy_slot = max_num_seqs
        self.token_pool = torch.zeros(num_rows, max_model_len + 1, dtype=torch.int32, device=device)
        """[slots, positions]: all tokens of each request, including sampled and drafted ones."""
        self._columns = -(-max_model_len // page_size)
        self.page_table = torch.zeros(
            num_rows, len(page_factors) * self._columns, dtype=torch.int32, device=device
        )
        """[slots, groups * pages]: page ids of each group, one group after another, in the order of
        positions."""
        self._page_factors = page_factors
        self.group_tables = torch.split(self.page_table, self._columns, dim=1)
        """Views of the page table by group, [slots, pages] each."""
        self.flat_tokens = self.token_pool.view(-1)
        self.token_stride = self.token_pool.shape[1]
        self.page_stride = self.page_table.shape[1]
        self.max_positions = self._columns * page_size
        """Number of positions that fit in the pages of a slot."""
        self._longest = 0
        """Length of the longest segment among the last staged writes."""
        self.sampling = SamplingState(
            num_rows=num_rows,
            token_stride=self.token_stride,
            vocab_size=vocab_size,
            device=device,
        )

    def apply(self, plan: Plan) -> None:
        """Applies the Plan's admissions and page writes. A Plan never writes a cell twice."""
        writes = self.stage(plan)
        if writes is not None:
            self.write(stage(writes, self.device))

    def stage(self, plan: Plan) -> dict[str, npt.NDArray[Any]] | None:
        """Sets the sampling parameters and adapters of admitted requests, and returns the Plan's
        writes for `write`: segments [4 * n] and values, as expected by `write_table_rows_`; None if
        there are none."""
        runs: list[tuple[int, int, npt.NDArray[np.int32]]] = []
        for admit in plan.admits:
            self.sampling.admit(admit)
            if self.adapters is not None:
                self.adapters[admit.slot] = admit.adapter
            tokens = np.frombuffer(admit.token_ids, dtype="<i4")
            assert len(tokens) <= self.max_model_len, "a request is longer than its row"
            runs.append((0, admit.slot * self.token_stride, tokens))
        for write in plan.page_writes:
            pages = np.array(write.page_ids, dtype=np.int32) * self._page_factors[write.group]
            assert write.start + len(pages) <= self._columns, (
                "a request has more pages than its row"
            )
            column = write.group * self._columns + write.start
            runs.append((1, write.slot * self.page_stride + column, pages))
        if not runs:
            return None
        lengths = np.array([len(values) for _, _, values in runs], dtype=np.int64)
        segments = np.empty((len(runs), 4), dtype=np.int64)
        segments[:, 0] = [table for table, _, _ in runs]
        segments[:, 1] = [cell for _, cell, _ in runs]
        segments[:, 2] = np.cumsum(lengths) - lengths
        segments[:, 3] = lengths
        self._longest = int(lengths.max())
        return {
            "segments": segments.reshape(-1),
            "values": np.concatenate([values for _, _, values in runs]),
        }

    def write(self, staged: Tensors) -> None:
        """Applies the writes last returned by `stage`, once they are on the device."""
        write_table_rows_(
            self.token_pool,
            self.page_table,
            staged["segments"].view(-1, 4),
            staged["values"],
            longest=self._longest,
        )

    def write_tokens(
        self, slots: IntArray, starts: IntArray, token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Writes token ids [R, n] to the token pool, at positions of `slots` [R] that start at
        `starts` [R]."""
        cells = (slots * self.token_stride + starts)[:, None] + np.arange(token_ids.shape[1])
        self.flat_tokens.index_copy_(
            0,
            to_device(torch.from_numpy(cells.reshape(-1)), self.device),
            to_device(torch.from_numpy(token_ids.astype(np.int32).reshape(-1)), self.device),
        )


def ragged_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenates the ranges [starts[i], starts[i] + lengths[i]) for all i."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    ranges: IntArray = np.arange(total, dtype=np.int64)
    ranges += np.repeat(starts - (ends - lengths), lengths)
    return ranges
