"""Insertion and deletion of tokens within a block, as used by LLaDA 2.2."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from worker.rank.diffusion.base import (
    BlockBatch,
    BoolArray,
    DiffusionAlgorithm,
    FloatArray,
    IntArray,
    lowest,
)

_POST_EDIT_STEPS, _UPDATES, _FINISHED, _INSERTED = 0, 1, 2, 3
"""Indices in a block's state. Starting with the last one, there is a flag for each position:
whether it was inserted rather than undecided when the block began."""


class JointThresholdInDel(DiffusionAlgorithm):
    """JointThreshold with two special tokens. One deletes the position for which it is proposed; an
    undecided position is appended to the block in its place. The other inserts an undecided
    position before the one for which it is proposed, which keeps its token; the last position of
    the block is dropped.

    Rounds follow SGLang's JointThresholdInDel: if a state of the block repeats, the least confident
    edit is changed; the number of rounds is limited, and the last one writes no special token.
    """

    edits: ClassVar[bool] = True
    default_threshold: ClassVar[float] = 0.5

    def init_step_state(self, block_size: int) -> tuple[int, ...]:
        """The initial state: no rounds, not finished, and no inserted positions."""
        return (0,) * (_INSERTED + block_size)

    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """Decides, edits, inserts and deletes positions in one round; arguments and result as in
        DiffusionAlgorithm."""
        assert states is not None, "an editing algorithm has a state"
        assert batch.special is not None, "the model has tokens for deletion and insertion"
        proposal = batch.propose_edits(logits)
        counts = batch.scored.sum(axis=1)
        firsts = counts.cumsum() - counts
        done: BoolArray = states[:, _FINISHED].astype(bool)
        for index in np.flatnonzero(~done).tolist():
            place = slice(firsts[index], firsts[index] + counts[index])
            block = _Block(batch, index, states[index], logits[place])
            is_done = block.update(*(part[index].copy() for part in proposal))
            done[index] = is_done and batch.report_at_once
        return done


class _Block:
    """One block in a round.

    Args:
        index: the block's index.
        state: the block's state, edited in place.
        logits: [scored positions, vocab]: its logits.
    """

    def __init__(
        self, batch: BlockBatch, index: int, state: IntArray, logits: torch.Tensor
    ) -> None:
        assert batch.special is not None, "the model has tokens for deletion and insertion"
        self._special = batch.special
        self._ids, self._undecided = batch.ids[index], batch.undecided[index]
        self._fixed, self._scored = batch.fixed[index], batch.scored[index]
        self._threshold = float(batch.params.threshold[index, 0])
        self._edit_threshold = float(batch.params.edit_threshold[index, 0])
        self._most_edits = int(batch.params.max_post_edit_steps[index, 0])
        self._history = batch.histories[index]
        self._state, self._logits = state, logits
        self._inserted = state[_INSERTED : _INSERTED + len(self._ids)]
        self._original: BoolArray = self._undecided & (self._inserted == 0)

    def update(
        self,
        tokens: IntArray,
        confidence: FloatArray,
        unmasked: IntArray,
        unmasked_confidence: FloatArray,
        plain: IntArray,
    ) -> bool:
        """Runs the round with proposals [B], as in EditProposal; returns whether the forward pass
        has computed the final tokens."""
        # Proposals: an undecided position cannot become undecided, unless it was inserted.
        is_last = self._count()
        if not is_last:
            still = self._original & (tokens == self._special.mask)
            tokens[still], confidence[still] = unmasked[still], unmasked_confidence[still]
        # Positions to write: undecided ones, and decided ones that differ.
        take = self._take(confidence, is_last)
        if self._most_edits == 0 and self._original.any() and not (self._original & ~take).any():
            is_last, take = True, self._undecided.copy()
        differs = (tokens != self._ids) & (confidence > self._edit_threshold)
        write: BoolArray = take | (~self._undecided & ~self._fixed & differs)
        if not write.any():
            self._state[_FINISHED] = 1
            return True
        # Tokens: no special ones in the last round, different ones if the state repeats.
        if is_last:
            special = write & np.isin(tokens, self._special)
            tokens[special] = plain[special]
        elif any(np.array_equal(entry[0], self._ids) for entry in self._history):
            self._diversify(tokens, confidence, write)
        before = self._ids.copy()
        self._history.append(np.stack((before, np.where(write, tokens, -1))).astype(np.int32))
        # Writes: tokens after a deletion or an insertion are shifted.
        self._ids[write] = tokens[write]
        if np.isin(tokens[write], self._special[1:]).any():
            self._move(before)
        self._undecided[:] = ~self._fixed & (self._ids == self._special.mask)
        self._state[_FINISHED] = is_last
        return is_last and np.array_equal(before, self._ids)

    def _count(self) -> bool:
        """Counts the round; returns whether it is the last one that may write tokens."""
        is_complete = not self._original.any()
        self._state[_UPDATES] += 1
        self._state[_POST_EDIT_STEPS] += is_complete
        return bool(
            (self._most_edits > 0 and self._state[_POST_EDIT_STEPS] >= self._most_edits)
            or (self._most_edits == 0 and is_complete)
            or self._state[_UPDATES] > len(self._ids) + self._most_edits
        )

    def _take(self, confidence: FloatArray, is_last: bool) -> BoolArray:
        """Undecided positions to decide: those above the threshold or, if there are too few, the
        most confident ones. Enough are decided to include at least one that was not inserted. In
        the last round, or if all were inserted, all are decided."""
        take: BoolArray = self._undecided.copy()
        if not is_last and self._original.any():
            least = 1 + int((take & ~self._original).sum())
            sure = take & (confidence > self._threshold)
            if sure.sum() < least:
                sure = lowest(-confidence[None], take[None], np.array([least]))[0]
            take = sure
        return take

    def _diversify(self, tokens: IntArray, confidence: FloatArray, write: BoolArray) -> None:
        """Replaces one of the proposals that change a token, the least confident one, with the best
        token that has not been proposed for that position before."""
        changing = np.flatnonzero(write & (tokens != self._ids))
        if not len(changing):
            return
        position = int(changing[confidence[changing].argmin()])
        excluded = {int(entry[1][position]) for entry in self._history} - {-1}
        if self._original[position]:
            excluded.add(self._special.mask)
        logits = self._logits[int(self._scored[:position].sum())].clone()
        logits[sorted(excluded)] = -torch.inf
        tokens[position] = int(logits.argmax())

    def _move(self, before: IntArray) -> None:
        """Applies deletions and insertions among the written tokens; `before` [B] has the tokens
        before writing."""
        size, first = len(self._ids), int(self._fixed.sum())
        ids, inserted = self._ids[:first].tolist(), self._inserted[:first].tolist()
        for position in range(first, size):
            token = int(self._ids[position])
            if token == self._special.delete:
                continue
            if token == self._special.split:
                ids.append(self._special.mask)
                inserted.append(1)
                token = int(before[position])
            ids.append(token)
            inserted.append(int(self._inserted[position]))
        missing = max(0, size - len(ids))
        self._ids[:] = (ids + [self._special.mask] * missing)[:size]
        self._inserted[:] = (inserted + [1] * missing)[:size]
