"""Rounds ahead: rounds of running blocks that are launched before the host knows the outcome of the
previous ones.

    host       launch N+1 ─ result N ─ launch N+2 ─ result N+1 ─
    device     … round N ──────│ round N+1 ──────────│ round N+2 …

The Plan's rows are windows: the running block or the next one. The device determines which of them
a row computes, as `BlockDecoder` does on the host for other steps:

    the block is not done            the block
    done, but not committed yet      the block, in a padding row of the graph, and the next block
    the same, but no padding row     only the block; the next one follows a round later
    done and committed               the next block
    the request has ended            nothing: the row becomes padding

Each step runs one round, in which `device_algorithms` decides positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from kernels import SamplingParameters
from worker.plan.plan import BlockOutcome, BlockRow, Plan, PlannedRow, Row, StepResult
from worker.rank.batch import Batch
from worker.rank.diffusion.device_algorithms import (
    ON_DEVICE,
    DeviceProposal,
    columns_of,
    decide,
    params_on_device,
)
from worker.rank.diffusion.proposal import ROUND_STRIDE, choose, entropies
from worker.rank.diffusion.results import NOT_RUN, BlockResults
from worker.rank.diffusion.table import BlockTable, Phase, SlotBlock
from worker.rank.sampling.state import staged_parameters
from worker.rank.streams import StepSlot
from worker.rank.tables import DeviceTables
from worker.rank.transfer import stage

_START, _NUM_FIXED, _ROUNDS, _PHASE, _STATES = 0, 1, 2, 3, 4
_UNDECIDED: Final = _STATES + 2
"""Index of the first column that flags undecided positions, in a block's row on the device."""


class BlocksAhead:
    """Running blocks of all slots, on the device.

    A slot's block is stored here from its first round ahead until `absorb`, otherwise in the block
    table.

    Args:
        table: the running blocks on the host.
        tables: the rank's tables, which hold the blocks' tokens.
        score: computes fp32 logits [S, vocab] from hidden states [S, hidden].
        max_blocks: returns the number of blocks of the largest graph; 0 without graphs.
        features: enabled optimizations.
    """

    def __init__(
        self,
        table: BlockTable,
        tables: DeviceTables,
        *,
        score: Callable[[torch.Tensor], torch.Tensor],
        max_blocks: Callable[[], int],
        features: Sequence[str],
    ) -> None:
        self.table, self.tables, self.score = table, tables, score
        self.early_exit = "early_exit" in features
        self.report_at_once = "report_at_once" in features
        self._max_blocks = max_blocks
        num_slots, block_size = table.ids.shape
        self.blocks = torch.zeros(
            num_slots, _UNDECIDED + block_size, dtype=torch.int64, device=tables.device
        )
        """[slots, columns]: position, progress, algorithm state and undecided positions of each
        block."""
        self._is_here = np.zeros(num_slots, dtype=np.bool_)
        self._launched: deque[RoundAhead] = deque()
        """Rounds whose outcomes are not in the block table yet, oldest first."""

    def suits(self, plan: Plan) -> bool:
        """Whether the Plan can run as a round ahead: all of its rows are windows, it fits a graph,
        LoRA is disabled, and the requests need nothing from the host between rounds."""
        if not 0 < len(plan.rows) < self._max_blocks() or self.tables.adapters is not None:
            return False
        if not all(isinstance(row, BlockRow) and row.is_window for row in plan.rows):
            return False
        table, slots = self.table, [row.slot for row in plan.rows]
        return (
            all(table.algorithm_name(slot) in ON_DEVICE for slot in slots)
            and not any(map(self.tables.sampling.has_processors, slots))
            and not table.streams_drafts[slots].any()
            and not table.params(slots).penalty.any()
        )

    def start(self, plan: Plan) -> RoundAhead:
        """Returns the Plan's round, ready to be launched."""
        slots = [row.slot for row in plan.rows]
        self._enter([slot for slot in slots if not self._is_here[slot]])
        launched = RoundAhead(self, [row for row in plan.rows if isinstance(row, BlockRow)])
        self._launched.append(launched)
        return launched

    def absorb(self) -> None:
        """Moves all blocks to the block table; waits for the device if rounds are in flight."""
        while self._launched:
            self._launched[0].wait()
            self.take(self._launched[0])
        self._is_here[:] = False

    def take(self, launched: RoundAhead) -> None:
        """Copies the outcome of the oldest round, which has completed, to the block table; does
        nothing if that was done before."""
        if not self._launched or self._launched[0] is not launched:
            return
        self._launched.popleft()
        for slot, block in launched.slot_blocks():
            self.table.put(slot, block)

    def _enter(self, slots: Sequence[int]) -> None:
        """Copies blocks from the block table; the tokens are on the device already."""
        if not slots:
            return
        blocks = np.zeros((len(slots), self.blocks.shape[1]), dtype=np.int64)
        for row, slot in zip(blocks, slots, strict=True):
            block = self.table.get(slot)
            position = (block.start, block.num_fixed, block.rounds, block.phase)
            row[:_UNDECIDED] = (*position, *block.state)
            row[_UNDECIDED:] = block.undecided
        arrays = {"slots": np.array(slots, dtype=np.int64), "blocks": blocks.reshape(-1)}
        staged = stage(arrays, self.tables.device)
        self.blocks.index_copy_(0, staged["slots"], staged["blocks"].view(blocks.shape))
        self._is_here[slots] = True


class RoundAhead:
    """A round launched ahead of the host's results. Call `place` before the forward pass, `run` and
    `fetch` after it, and `add_to` once its step has completed.

    Args:
        ahead: the running blocks on the device.
        rows: windows of the Plan.
    """

    def __init__(self, ahead: BlocksAhead, rows: Sequence[BlockRow]) -> None:
        self._ahead, self._rows = ahead, rows
        table, sampling = ahead.table, ahead.tables.sampling
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        self._names = [table.algorithm_name(row.slot) for row in rows]
        self._is_random, self._filters = sampling.any_random(slots), sampling.filters(slots)
        # The device knows the positions, so those of the columns are not read.
        columns = sampling.columns(slots, slots)
        self._max_top_k = int(columns["top_k"].max())
        limits, ends = table.limits(slots.tolist())
        self._staged = stage(
            {
                "slots": slots,
                "limits": limits,
                "ends": ends.reshape(-1),
                **columns,
                **columns_of(self._names, table.params(slots.tolist()), table.block_size),
            },
            ahead.tables.device,
        )
        self._placed: _Placed | None = None
        self._outcome: torch.Tensor | None = None
        self._slot: StepSlot | None = None

    @property
    def planned(self) -> list[Row]:
        """Rows of the forward pass, each for one block; `place` sets their slots and positions.
        There is one per window, and a dummy row, so that the graph has room to commit a block."""
        size, dummy_slot = self._ahead.table.block_size, self._ahead.tables.dummy_slot
        windows = [PlannedRow(row.slot, row.start, size, 0) for row in self._rows]
        return [*windows, PlannedRow(dummy_slot, 0, size, 0)]

    def place(self, batch: Batch) -> None:
        """Sets the slots and positions of the batch's rows, and the tokens of new blocks."""
        assert batch.staged is not None, "rows of graphs are on the device"
        ahead, tables, size = self._ahead, self._ahead.tables, self._ahead.table.block_size
        slots = self._staged["slots"]
        blocks = ahead.blocks.index_select(0, slots)
        phase = blocks[:, _PHASE]
        row_slots, row_starts = batch.staged["slots"], batch.staged["starts"]
        num_rows, num_commits = len(slots), len(row_slots) - len(slots)
        # Rows of the padding commit finished blocks, the first ones if there are too few rows.
        # HAZARD: the last column is written by all other blocks, in any order, and not read.
        is_finished = phase == Phase.FINISHED
        order = is_finished.cumsum(dim=0) - 1
        is_fused = is_finished & (order < num_commits)
        commits = torch.zeros(2, num_commits + 1, dtype=torch.int64, device=tables.device)
        commits[0].fill_(tables.dummy_slot)
        columns = order.masked_fill(~is_fused, num_commits).expand(2, num_rows)
        commits.scatter_(1, columns, torch.stack((slots, blocks[:, _START])))
        row_slots[num_rows:] = commits[0, :num_commits]
        row_starts[num_rows:] = commits[1, :num_commits]
        # The first rows compute the block, the next one, or nothing.
        advances, has_ended = is_fused | (phase == Phase.COMMITTED), phase == Phase.ENDED
        following = torch.zeros_like(blocks)
        following[:, _START] = blocks[:, _START] + size
        following[:, _UNDECIDED:] = 1
        blocks = torch.where(advances.unsqueeze(1), following, blocks)
        row_slots[:num_rows] = slots.masked_fill(has_ended, tables.dummy_slot)
        row_starts[:num_rows] = blocks[:, _START].masked_fill(has_ended, 0)
        # Tokens: a new block has none.
        firsts = row_slots[:num_rows] * tables.token_stride + row_starts[:num_rows]
        cells = (firsts.unsqueeze(1) + torch.arange(size, device=tables.device)).flatten()
        ids = tables.flat_tokens.index_select(0, cells).view(num_rows, size)
        ids = ids.masked_fill(advances.unsqueeze(1), ahead.table.mask_token_id)
        tables.flat_tokens.index_copy_(0, cells, ids.flatten())
        decides = advances | (phase == Phase.RUNNING)
        self._placed = _Placed(blocks, ids, cells, decides, has_ended)

    def run(self, hidden: torch.Tensor) -> None:
        """Decides positions of the blocks, given hidden states [T, hidden] of the batch's tokens,
        and writes the blocks."""
        assert self._placed is not None, "the round was not placed"
        blocks, ids, cells, decides, has_ended = self._placed
        ahead, size = self._ahead, self._ahead.table.block_size
        undecided = blocks[:, _UNDECIDED:] > 0
        places = torch.arange(size, device=hidden.device)
        params = params_on_device(self._names, self._staged)
        new = decide(
            *(ids, undecided, places < blocks[:, _NUM_FIXED, None], blocks[:, _ROUNDS, None]),
            *(blocks[:, _STATES:_UNDECIDED], self._propose(hidden[: len(blocks) * size])),
            params,
            report_at_once=ahead.report_at_once,
        )
        edits = has_ended & False if params.edits is None else params.edits.squeeze(1)
        counts_round = undecided.any(dim=1) | edits
        # Rows without a round keep their blocks.
        is_row = decides.unsqueeze(1)
        ids = torch.where(is_row, new.ids, ids)
        undecided = torch.where(is_row, new.undecided, undecided)
        states = torch.where(is_row, new.states, blocks[:, _STATES:_UNDECIDED])
        # A block is done if the algorithm says so, if all is decided, or if its request ends.
        num_last = self._num_last(blocks, ids, undecided)
        is_done = new.done | (~undecided.any(dim=1) & ~edits)
        num_tokens = torch.where(is_done, size - blocks[:, _NUM_FIXED], num_last)
        if ahead.early_exit:
            is_done |= ~edits & (num_last >= 0)
        phase = torch.full_like(num_last, Phase.FINISHED).masked_fill(new.done, Phase.COMMITTED)
        phase = phase.masked_fill(num_last >= 0, Phase.ENDED).masked_fill(~is_done, Phase.RUNNING)
        phase = phase.masked_fill(~decides, Phase.COMMITTED).masked_fill(has_ended, Phase.ENDED)
        position = (blocks[:, _START], blocks[:, _NUM_FIXED], blocks[:, _ROUNDS] + decides, phase)
        blocks = torch.cat((torch.stack(position, dim=1), states, undecided), dim=1)
        ahead.blocks.index_copy_(0, self._staged["slots"], blocks)
        ahead.tables.flat_tokens.index_copy_(0, cells, ids.flatten())
        outcome = (~has_ended, decides, counts_round, is_done, new.done, num_tokens)
        self._outcome = torch.cat((blocks, ids, torch.stack(outcome, dim=1)), dim=1)

    def fetch(self, slot: StepSlot) -> None:
        """Launches the copy of the outcome to the host."""
        assert self._outcome is not None, "the round was not run"
        self._outcome, self._slot = slot.fetch(self._outcome), slot

    def wait(self) -> None:
        """Waits until the outcome is on the host."""
        if self._slot is not None:
            self._slot.wait()

    def add_to(self, result: StepResult) -> StepResult:
        """The step's result, completed with the outcomes and tokens of the round. The round must
        have completed."""
        self._ahead.take(self)
        found = [self._outcome_of(row, *columns) for row, *columns in self._on_host()]
        token_ids = [token_id for _, tokens in found for token_id in tokens]
        return BlockResults(
            outcomes=[outcome for outcome, _ in found],
            token_ids=token_ids,
            logprobs=[None] * len(token_ids),
            num_forwards=int(any(outcome.num_forwards for outcome, _ in found)),
        ).add_to(result)

    def slot_blocks(self) -> Iterator[tuple[int, SlotBlock]]:
        """Slots and blocks of the rows after the round. The round must have completed."""
        for row, block, ids, _ in self._on_host():
            yield (
                row.slot,
                SlotBlock(
                    start=block[_START],
                    num_fixed=block[_NUM_FIXED],
                    rounds=block[_ROUNDS],
                    phase=Phase(block[_PHASE]),
                    state=block[_STATES:_UNDECIDED],
                    ids=ids,
                    undecided=block[_UNDECIDED:],
                ),
            )

    def _on_host(self) -> Iterator[tuple[BlockRow, list[int], list[int], list[int]]]:
        """The rows, with the columns of their blocks, their tokens, and their outcomes."""
        assert self._outcome is not None, "the round was not run"
        width, size = self._ahead.blocks.shape[1], self._ahead.table.block_size
        for row, values in zip(self._rows, self._outcome.tolist(), strict=True):
            yield row, values[:width], values[width : width + size], values[width + size :]

    def _outcome_of(
        self, row: BlockRow, block: list[int], ids: list[int], outcome: list[int]
    ) -> tuple[BlockOutcome, list[int]]:
        """The outcome and the new tokens of a row."""
        is_run, decides, counts_round, is_done, is_committed, num_tokens = outcome
        if not is_run:
            return NOT_RUN, []
        if not decides:
            return msgspec.structs.replace(NOT_RUN, num_forwards=1), []
        first = block[_NUM_FIXED]
        tokens = ids[first : first + num_tokens] if is_done else []
        return BlockOutcome(
            num_tokens=len(tokens),
            is_committed=bool(is_committed),
            num_rounds=counts_round,
            num_forwards=1,
            state=b"" if is_done else self._ahead.table.save(row.slot),
        ), tokens

    def _propose(self, hidden: torch.Tensor) -> DeviceProposal:
        """Proposes a token for each position of the blocks, as `propose` does."""
        assert self._placed is not None, "the round was not placed"
        blocks, size = self._placed.blocks, self._ahead.table.block_size
        logits = self._ahead.score(hidden)
        logits[:, self._ahead.table.mask_token_id] = -torch.inf
        random: SamplingParameters | None = None
        if self._is_random:
            names = ("seeds", "temperature", *self._filters)
            columns = {name: self._staged[name].repeat_interleave(size) for name in names}
            columns["seeds"] += (blocks[:, _ROUNDS] * int(ROUND_STRIDE)).repeat_interleave(size)
            places = torch.arange(size, device=hidden.device)
            positions = (blocks[:, _START, None] + places).flatten()
            random = staged_parameters(columns, positions, self._filters, self._max_top_k)
        tokens, shares = choose(logits, random)
        entropy = None
        if "EntropyBounded" in self._names:
            entropy = entropies(shares).view(-1, size)
        confidence = shares.gather(1, tokens.unsqueeze(1))
        return DeviceProposal(tokens.int().view(-1, size), confidence.view(-1, size), entropy)

    def _num_last(
        self, blocks: torch.Tensor, ids: torch.Tensor, undecided: torch.Tensor
    ) -> torch.Tensor:
        """Number of tokens [N] that the blocks add if their requests are certain to end within
        them, otherwise -1: as in `BlockTable.finished_tokens`."""
        size, num_fixed = ids.shape[1], blocks[:, _NUM_FIXED]
        places = torch.arange(size, device=ids.device).expand_as(ids)
        num_decided = places.masked_fill(~undecided, size).amin(dim=1)
        ends = self._staged["ends"].view(len(ids), 1, -1)
        is_end = (ids.unsqueeze(2) == ends).any(dim=2) & (places >= num_fixed.unsqueeze(1))
        is_end &= places < num_decided.unsqueeze(1)
        first_end = places.masked_fill(~is_end, size).amin(dim=1)
        num_left = self._staged["limits"] - blocks[:, _START] - num_fixed
        by_length = num_left.masked_fill(num_decided - num_fixed < num_left, -1)
        return torch.where(first_end < size, first_end - num_fixed + 1, by_length)


class _Placed(NamedTuple):
    """State of the blocks in a round's windows before the round."""

    blocks: torch.Tensor
    """[N, columns], as in BlocksAhead."""
    ids: torch.Tensor
    """[N, B] int32: tokens; the mask token if undecided."""
    cells: torch.Tensor
    """[N * B] int64: cells of the flat token pool."""
    decides: torch.Tensor
    """[N] bool: whether the round decides positions of the row's block."""
    has_ended: torch.Tensor
    """[N] bool: whether the request has ended."""
