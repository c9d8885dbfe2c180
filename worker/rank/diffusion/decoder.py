"""Block decoder: runs the rounds of a Plan's running blocks on one rank.

A round is one forward pass over the blocks and one step of their algorithm on its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.plan.plan import BlockOutcome, BlockRow, Plan, Row
from worker.protocol.diffusion import DllmAlgorithm
from worker.rank.diffusion.ahead import BlocksAhead, RoundAhead
from worker.rank.diffusion.base import BlockBatch, BoolArray, IntArray, scored_positions
from worker.rank.diffusion.proposal import propose, propose_edits, random_positions
from worker.rank.diffusion.results import NOT_RUN, BlockResults
from worker.rank.diffusion.running import RunningBlock, index_logits, logits_rows
from worker.rank.diffusion.scoring import ScoredPositions
from worker.rank.diffusion.table import BlockTable
from worker.rank.sampling.masks import MaskRows
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

Forward = Callable[[Plan, torch.Tensor], torch.Tensor]
"""Runs a Plan's rows; returns the hidden states [S, hidden] of the tokens at the given indices [S].
"""
Score = Callable[[torch.Tensor], torch.Tensor]
"""Computes fp32 logits [S, vocab] from hidden states [S, hidden]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStep:
    """A Plan with its running blocks; windows are replaced by the positions to compute."""

    plan: Plan
    blocks: Sequence[RunningBlock] = ()
    """Running blocks, one per BlockRow of `plan`."""
    logits_indices: torch.Tensor | None = None
    """[S] int64: indices of the first pass's tokens whose logits are needed; None if there are no
    rows."""
    left_out: tuple[int, ...] = ()
    """Indices, among the BlockRows of the original Plan, of windows whose requests had ended."""
    ahead: RoundAhead | None = None
    """The Plan's round if it is launched before the outcome of the previous step is known. The
    round then holds the running blocks. None for other steps."""


class BlockDecoder:
    """Runs rounds of running blocks, whose requests may use different algorithms.

    All ranks have the same logits and make the same decisions, so they run the same rounds.

    Args:
        config: the engine's configuration; `dllm.fdfo` is the execution mode.
        model: the model's configuration: block size, mask token and vocabulary.
        tables: the rank's tables, from which forward passes read tokens.
        forward: runs a Plan's rows, whose tokens are in the tables.
        score: computes logits from hidden states.
        max_graph_blocks: returns the number of blocks of the largest CUDA graph; 0 without graphs,
            in which case no round is launched ahead.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tables: DeviceTables,
        *,
        forward: Forward,
        score: Score,
        max_graph_blocks: Callable[[], int] = lambda: 0,
    ) -> None:
        assert model.mask_token_id is not None, "an autoregressive model has no blocks"
        self._tables = tables
        self._forward = forward
        self._score = score
        self._first_done_first_out = config.dllm.fdfo
        features = config.dllm.features
        self._early_exit = "early_exit" in features
        self._masked_logits = "masked_logits" in features
        self._report_at_once = "report_at_once" in features
        self._needs_no_commit = "fused_commit" in features or "skip_last_commit" in features
        self._block_size = model.block_size
        self._vocab_size = model.vocab_size
        self.table = BlockTable(
            num_slots=tables.token_pool.shape[0],
            block_size=model.block_size,
            mask_token_id=model.mask_token_id,
            edit_token_ids=model.edit_token_ids,
            algorithm=config.dllm.algorithm,
            threshold=config.dllm.threshold,
        )
        self._ahead: BlocksAhead | None = None
        """Blocks on the device; None if no step can be launched ahead: on CPU, or if `dllm.fdfo` is
        disabled."""
        if tables.device.type == "cuda" and config.dllm.fdfo:
            self._ahead = BlocksAhead(
                *(self.table, tables),
                score=score,
                max_blocks=max_graph_blocks,
                features=features,
            )

    def prepare(self, plan: Plan) -> BlockStep:
        """Admits the Plan's requests, resolves windows, and writes the tokens of new blocks to the
        tables.

        HAZARD: no cell may be written both here and by the Plan's own writes, which come later.
        This holds because an admission writes known tokens, and undecided positions come after
        these.
        """
        if self._ahead is not None:
            if self._ahead.suits(plan):
                assert not plan.accepts, "a Plan of windows accepts no tokens"
                assert not plan.admits, "a Plan of windows admits no request"
                ahead = self._ahead.start(plan)
                plan = msgspec.structs.replace(plan, rows=ahead.planned)
                return BlockStep(plan=plan, ahead=ahead)
            self._ahead.absorb()
        for accept in plan.accepts:
            self.table.accept(accept.slot, accept.end)
        # Done before the next block is entered: this one is not committed yet.
        self._write([accept.slot for accept in plan.accepts])
        for admit in plan.admits:
            self.table.admit(admit)
        step = self._placed(plan)
        plan = step.plan
        self._write(
            [row.slot for row in plan.rows if isinstance(row, BlockRow) and self._enter(row)]
        )
        blocks: list[RunningBlock] = []
        end = 0
        for row in plan.rows:
            end += row.length
            if isinstance(row, BlockRow):
                block = BlockRow(row.slot, self._block_start(row), self._block_size)
                blocks.append(RunningBlock(row=block, first_token=end - self._block_size))
        return replace(
            step, blocks=blocks, logits_indices=self._index_logits(blocks) if plan.rows else None
        )

    def _enter(self, row: BlockRow) -> bool:
        """Makes the row's block the running block of its slot; returns whether its tokens must be
        written to the device.

        The tokens of the previous block then count for penalties. Tokens of a request that this
        Plan admits are counted when it is admitted.
        """
        table, slot, start = self.table, row.slot, self._block_start(row)
        if 0 <= table.starts[slot] < start:
            self._tables.sampling.count_block(slot, table.new_ids(slot))
        return table.enter(slot, start)

    def run(
        self, step: BlockStep, hidden: torch.Tensor | None, masks: bytes = b""
    ) -> BlockResults | RoundAhead:
        """Runs the Plan's rounds after their first forward pass. A round ahead is only launched.

        Args:
            step: the step as `prepare` returned it.
            hidden: hidden states [S, hidden] of the tokens `step.logits_indices`; None if there are
                no rows.
            masks: bitmasks of the blocks in `Plan.masked`, as in a Sample message.
        """
        plan = step.plan
        if step.ahead is not None:
            assert hidden is not None, "the step has rows"
            step.ahead.run(hidden)
            return step.ahead
        if hidden is None:
            outcomes = [NOT_RUN] * len(step.left_out)
            return BlockResults(outcomes=outcomes, token_ids=[], logprobs=[], num_forwards=0)
        blocks = step.blocks
        if not blocks:
            return BlockResults(outcomes=[], token_ids=[], logprobs=[], num_forwards=1)
        mask_bytes = -(-self._vocab_size // 32) * 4
        for index, number in enumerate(plan.masked):
            blocks[number].mask = masks[index * mask_bytes : (index + 1) * mask_bytes]
        num_forwards = self._run_rounds(plan, blocks, hidden)
        outcomes = [self._outcome(block) for block in blocks]
        for index in step.left_out:
            outcomes.insert(index, NOT_RUN)
        return BlockResults(
            outcomes=outcomes,
            token_ids=[token_id for block in blocks for token_id in block.token_ids],
            logprobs=[logprobs for block in blocks for logprobs in block.logprobs],
            num_forwards=num_forwards,
        )

    def _run_rounds(self, plan: Plan, blocks: Sequence[RunningBlock], hidden: torch.Tensor) -> int:
        """Runs rounds until the step ends; returns the number of forward passes.

        With first done, first out (FDFO), the step ends when any block is done, or after
        `Plan.max_rounds`; the other blocks continue in the next step. Without it, the step ends
        when all blocks are done; blocks that finish earlier stay in the forward passes until then.
        """
        num_forwards = 0
        while True:
            if num_forwards:
                hidden = self._forward_blocks(plan.seq, blocks)
            num_forwards += 1
            for block in blocks:
                block.num_forwards += 1
            self._step([block for block in blocks if not block.is_over], hidden)
            are_over = [block.is_over for block in blocks]
            if all(are_over):
                return num_forwards
            if self._first_done_first_out and (any(are_over) or num_forwards == plan.max_rounds):
                return num_forwards

    def _forward_blocks(self, seq: int, blocks: Sequence[RunningBlock]) -> torch.Tensor:
        """Hidden states of one forward pass over the blocks, without other rows of the Plan."""
        for index, block in enumerate(blocks):
            block.first_token = index * self._block_size
        plan = Plan(seq, [], [], [block.row for block in blocks])
        return self._forward(plan, self._index_logits(blocks))

    def _step(self, blocks: Sequence[RunningBlock], hidden: torch.Tensor) -> None:
        """Runs one step of the algorithms for unfinished blocks."""
        by_name: dict[DllmAlgorithm, list[RunningBlock]] = {}
        guided: list[RunningBlock] = []
        for block in blocks:
            if block.mask is None:
                by_name.setdefault(self.table.algorithm_name(block.row.slot), []).append(block)
            else:
                guided.append(block)
        for name, group in by_name.items():
            self._step_algorithm(name, group, hidden)
        self._write([block.row.slot for block in blocks if block.mask is None])
        if guided:
            self._step_guided(guided, hidden)

    def _step_algorithm(
        self, name: DllmAlgorithm, blocks: Sequence[RunningBlock], hidden: torch.Tensor
    ) -> None:
        table, algorithm = self.table, self.table.algorithm(name)
        slots = [block.row.slot for block in blocks]
        undecided, fixed = table.undecided[slots], table.fixed[slots]
        was_open = [bool(row.any()) for row in undecided]
        scored = scored_positions(algorithm, undecided, fixed, only_needed=self._masked_logits)
        positions = self._scores(blocks, scored, hidden)
        batch = BlockBatch(
            ids=table.ids[slots],
            undecided=undecided,
            fixed=fixed,
            scored=scored,
            rounds=table.rounds[slots],
            params=table.params(slots),
            report_at_once=self._report_at_once,
            propose=lambda logits: propose(
                *(logits, scored),
                mask_token_id=table.mask_token_id,
                random=positions.random,
                with_entropy=algorithm.needs_entropy,
            ),
            propose_edits=lambda logits: propose_edits(
                logits, scored, table.special, positions.random
            ),
            histories=[table.histories[slot] for slot in slots],
            special=table.special,
        )
        has_state = algorithm.init_step_state(self._block_size) is not None
        states: IntArray | None = table.states[slots] if has_state else None
        done = algorithm.step(batch, positions.logits, states)
        changed: BoolArray = batch.ids != table.ids[slots]
        for row, column, logprobs in positions.logprobs(batch.ids, changed):
            table.set_logprobs(slots[row], column, logprobs)
        table.ids[slots], table.undecided[slots] = batch.ids, batch.undecided
        if states is not None:
            table.states[slots] = states
        table.rounds[slots] += 1
        for block, is_done, was in zip(blocks, done.tolist(), was_open, strict=True):
            block.num_rounds += was or algorithm.edits
            self._finish(block, is_done, edits=algorithm.edits)

    def _step_guided(self, blocks: Sequence[RunningBlock], hidden: torch.Tensor) -> None:
        """Runs one step for blocks under a grammar: proposes tokens for the grammar to check, at
        the leftmost undecided position and at those after it, up to the first whose probability is
        not above the threshold."""
        table = self.table
        slots = [block.row.slot for block in blocks]
        undecided = table.undecided[slots]
        positions = self._scores(blocks, undecided, hidden)
        counts = undecided.sum(axis=1)
        masks = b"".join(block.mask or b"" for block in blocks)
        firsts = (counts.cumsum() - counts).tolist()
        rows = MaskRows(firsts, masks, self._vocab_size, hidden.device)
        rows.apply(positions.logits, native=self._tables.native_sampling)
        proposal = propose(
            *(positions.logits, undecided),
            mask_token_id=table.mask_token_id,
            random=positions.random,
        )
        sure = proposal.confidence > table.params(slots).threshold
        table.proposed[slots] = proposal.token_ids
        table.rounds[slots] += 1
        proposed: BoolArray = np.zeros_like(undecided)
        for index, block in enumerate(blocks):
            first = int(undecided[index].argmax())
            later = sure[index, first + 1 :]
            num_sure = len(later) if later.all() else int(later.argmin())
            proposed[index, first : first + 1 + num_sure] = True
            block.token_ids = proposal.token_ids[index, proposed[index]].tolist()
            block.logprobs = [None] * len(block.token_ids)
            block.num_rounds += 1
            block.is_paused = True
        firsts = proposed.argmax(axis=1).tolist()
        for row, column, logprobs in positions.logprobs(proposal.token_ids, proposed):
            blocks[row].logprobs[column - firsts[row]] = logprobs

    def _scores(
        self, blocks: Sequence[RunningBlock], scored: BoolArray, hidden: torch.Tensor
    ) -> ScoredPositions:
        """The scored positions [N, B] of blocks, with their logits after logits processors.

        Penalties at a position count the tokens before its block and those to its left in the
        block.
        """
        rows, columns = np.nonzero(scored)
        sampling, table = self._tables.sampling, self.table
        slots = np.array([block.row.slot for block in blocks], dtype=np.int64)[rows]
        index, starts = logits_rows(blocks, rows, columns), table.starts[slots]
        if len(index) < len(hidden):
            hidden = hidden.index_select(0, to_device(torch.from_numpy(index), hidden.device))
        logits, raw = self._score(hidden), None
        # Undecided positions have the mask token, which is never proposed, penalized or not.
        num_new = np.maximum(columns - table.fixed[slots].sum(axis=1), 0)
        processed = sampling.gather_positions(slots, starts + columns, num_new)
        if processed is not None:
            if processed.logprobs is not None:
                raw = logits.index_select(0, processed.logprobs.rows)
            sampling.process(logits, processed, self._tables.token_pool)
        return ScoredPositions(
            rows=rows,
            columns=columns,
            logits=logits,
            random=random_positions(sampling, slots, starts + columns, table.rounds[slots]),
            reported=None if processed is None else processed.logprobs,
            raw=raw,
        )

    def _index_logits(self, blocks: Sequence[RunningBlock]) -> torch.Tensor:
        tokens = index_logits(blocks, self.table, only_needed=self._masked_logits)
        return to_device(torch.from_numpy(tokens), self._tables.token_pool.device)

    def _finish(self, block: RunningBlock, is_done: bool, *, edits: bool) -> None:
        """Decides whether the block is done and, if so, with which tokens."""
        slot = block.row.slot
        if is_done:
            block.is_done = block.is_committed = True
            block.token_ids = self.table.new_ids(slot).tolist()
        elif edits:
            return
        elif self._needs_no_commit and not self.table.undecided[slot].any():
            block.is_done = True
            block.token_ids = self.table.new_ids(slot).tolist()
        elif self._early_exit and (tokens := self.table.finished_tokens(slot)) is not None:
            block.is_done = True
            block.token_ids = tokens
        if block.is_done:
            block.logprobs = self.table.token_logprobs(slot, len(block.token_ids))
            self.table.finish(slot, is_committed=block.is_committed)

    def _placed(self, plan: Plan) -> BlockStep:
        windows = [row for row in plan.rows if isinstance(row, BlockRow) and row.is_window]
        if not windows:
            return BlockStep(plan=plan)
        rows: list[Row] = []
        left_out: list[int] = []
        for number, row in enumerate(windows):
            span = self.table.span(row.slot)
            if span is None:
                left_out.append(number)
                continue
            start, end = span
            assert row.start <= start < end <= row.start + row.length, "the span is outside the row"
            rows.append(BlockRow(row.slot, start, end - start))
        return BlockStep(plan=msgspec.structs.replace(plan, rows=rows), left_out=tuple(left_out))

    def _outcome(self, block: RunningBlock) -> BlockOutcome:
        return BlockOutcome(
            num_tokens=len(block.token_ids),
            is_committed=block.is_committed,
            num_rounds=block.num_rounds,
            num_forwards=block.num_forwards,
            state=b"" if block.is_done else self.table.save(block.row.slot),
            draft=self._draft(block),
        )

    def _draft(self, block: RunningBlock) -> list[int] | None:
        slot = block.row.slot
        if block.is_over or not self.table.streams_drafts[slot]:
            return None
        return self.table.draft(slot)

    def _write(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        rows = np.asarray(slots, dtype=np.int64)
        self._tables.write_tokens(rows, self.table.starts[rows], self.table.ids[rows])

    def _block_start(self, row: BlockRow) -> int:
        return row.start + row.length - self._block_size
