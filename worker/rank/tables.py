"""State of all running requests on the device: one stable row per slot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels import registry
from worker.plan.plan import Admit, PageWrite, Plan
from worker.rank.sampling.rules import RuleTable
from worker.rank.transfer import to_device

IntArray = npt.NDArray[np.int64]


class DeviceTables:
    """Token pool and page table on the device, sampling parameters on the host.

    Row `max_num_seqs` belongs to no request: padding may read and write it. Page 0 is the dummy
    page, so an unset entry of the page table is harmless.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        vocab_size: int,
        device: torch.device,
        native_draws: bool = False,
        block_size: int = 1,
    ) -> None:
        num_rows = max_num_seqs + 1
        self.native_draws = native_draws
        """Whether the compiled CPU library draws."""
        self.block_size = block_size
        """Positions that see each other; rows consist of whole blocks."""
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.token_pool = torch.zeros(num_rows, max_model_len + 1, dtype=torch.int32, device=device)
        """[slots, positions]: every token of a request, the newest draw included."""
        self.page_table = torch.zeros(
            num_rows, -(-max_model_len // page_size), dtype=torch.int32, device=device
        )
        """[slots, pages] in the order of positions."""
        self.sampling = SamplingColumns(num_rows)
        self.flat_tokens = self.token_pool.view(-1)
        self.flat_pages = self.page_table.view(-1)
        self.token_stride = self.token_pool.shape[1]
        self.page_stride = self.page_table.shape[1]
        self.rules = RuleTable(
            num_rows=num_rows,
            token_stride=self.token_stride,
            vocab_size=vocab_size,
            device=device,
        )

    @property
    def prepares_on_device(self) -> bool:
        """Whether kernels gather each step's inputs."""
        return not self.native_draws and registry.uses_triton(self.token_pool)

    def apply(self, plan: Plan) -> None:
        """Brings the tables to where the Plan's rows expect them. A Plan writes no cell twice."""
        if plan.admits:
            self._admit(plan.admits)
        if plan.page_writes:
            self._write_pages(plan.page_writes)

    def write_tokens(
        self, slots: IntArray, starts: IntArray, token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Writes token ids [R, n] to positions from `starts` on of each slot."""
        lengths = np.full(len(slots), token_ids.shape[1], dtype=np.int64)
        cells = slots * self.token_stride + starts
        self._write(self.flat_tokens, cells.tolist(), lengths.tolist(), token_ids.reshape(-1))

    def stage(self, plan: Plan) -> tuple[IntArray, npt.NDArray[np.int32]] | None:
        """The same for a kernel that does the writing: its segments and values; None without any.

        Rules and sampling parameters are set at once, as by `apply`.
        """
        runs: list[tuple[int, int, npt.NDArray[np.int32]]] = []
        for admit in plan.admits:
            self.sampling.set(admit)
            self.rules.admit(admit)
            tokens = np.frombuffer(admit.token_ids, dtype="<i4")
            assert len(tokens) <= self.max_model_len, "a request is longer than its row"
            runs.append((0, admit.slot * self.token_stride, tokens))
        for write in plan.page_writes:
            pages = np.array(write.page_ids, dtype=np.int32)
            assert write.start + len(pages) <= self.page_stride, (
                "a request has more pages than its row"
            )
            runs.append((1, write.slot * self.page_stride + write.start, pages))
        if not runs:
            return None
        lengths = np.array([len(values) for _, _, values in runs], dtype=np.int64)
        segments = np.empty((len(runs), 4), dtype=np.int64)
        segments[:, 0] = [table for table, _, _ in runs]
        segments[:, 1] = [cell for _, cell, _ in runs]
        segments[:, 2] = np.cumsum(lengths) - lengths
        segments[:, 3] = lengths
        return segments, np.concatenate([values for _, _, values in runs])

    def _admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self.sampling.set(admit)
            self.rules.admit(admit)
        tokens = np.frombuffer(b"".join(admit.token_ids for admit in admits), dtype="<i4")
        lengths = [len(admit.token_ids) // 4 for admit in admits]
        assert max(lengths) <= self.max_model_len, "a request is longer than its row"
        starts = [admit.slot * self.token_stride for admit in admits]
        self._write(self.flat_tokens, starts, lengths, tokens)

    def _write_pages(self, writes: Sequence[PageWrite]) -> None:
        pages = np.array([page for write in writes for page in write.page_ids], dtype=np.int32)
        lengths = [len(write.page_ids) for write in writes]
        starts = [write.slot * self.page_stride + write.start for write in writes]
        assert all(write.start + len(write.page_ids) <= self.page_stride for write in writes), (
            "a request has more pages than its row"
        )
        self._write(self.flat_pages, starts, lengths, pages)

    def _write(
        self,
        table: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        values: npt.NDArray[np.int32],
    ) -> None:
        index = ragged_ranges(
            np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        )
        # A copy, since frombuffer's arrays are read-only, which tensors cannot be.
        values_host = torch.from_numpy(values.astype(np.int32))
        index_host = torch.from_numpy(index)
        table.index_copy_(
            0, to_device(index_host, table.device), to_device(values_host, table.device)
        )


class SamplingColumns:
    """Sampling parameters by slot, kept where the step is prepared."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.log_min_p = np.full(num_rows, -np.inf, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.int64)

    def set(self, admit: Admit) -> None:
        """Fills the row of the request's slot."""
        slot = admit.slot
        self.temperature[slot] = admit.temperature
        self.top_k[slot] = max(0, admit.top_k)
        self.top_p[slot] = admit.top_p
        self.log_min_p[slot] = math.log(admit.min_p) if admit.min_p > 0.0 else -math.inf
        self.seed[slot] = admit.seed


def ragged_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """[starts[i], starts[i] + lengths[i]) for all i, one after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    ranges: IntArray = np.arange(total, dtype=np.int64)
    ranges += np.repeat(starts - (ends - lengths), lengths)
    return ranges
