"""Block-diffusion algorithms, by their names in `--dllm-algorithm` and in requests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np
import torch

from worker.protocol.diffusion import DllmAlgorithm
from worker.rank.diffusion.base import BlockBatch, BoolArray, DiffusionAlgorithm, IntArray

_POST_EDIT_STEPS, _FINISHED = 0, 1


class LowConfidence(DiffusionAlgorithm):
    """Decides positions whose confidence is above the threshold; if none is, the most confident.

    A block is done after the forward pass in which it has no undecided position (LLaDA, arXiv
    2502.09992; dynamic thresholds: Fast-dLLM, arXiv 2505.22618).
    """

    edits: ClassVar[bool] = False
    default_threshold: ClassVar[float] = 0.95

    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """Decides positions in one round; arguments and result as in DiffusionAlgorithm."""
        done: BoolArray = np.logical_not(batch.undecided.any(axis=1))
        proposal = batch.propose(logits)
        take = unmask(batch, proposal.confidence)
        batch.ids[take] = proposal.token_ids[take]
        batch.undecided[take] = False
        return done


def unmask(batch: BlockBatch, confidence: np.ndarray) -> BoolArray:
    """Mask [N, B] of the positions to decide: undecided ones above the threshold, or the most
    confident undecided one of a block without any. `confidence`: [N, B]."""
    confidence = np.where(batch.undecided, confidence, -1.0)
    take: BoolArray = batch.undecided & (confidence > batch.params.threshold)
    (short,) = np.nonzero(~take.any(axis=1) & batch.undecided.any(axis=1))
    take[short, confidence[short].argmax(axis=1)] = True
    return take


class JointThreshold(DiffusionAlgorithm):
    """Decides positions above `threshold` (mask to token), and replaces decided tokens above
    `edit_threshold` (token to token), as LLaDA 2.1 does.

    Once no position is undecided, editing continues for a limited number of rounds; a round that
    changes nothing finishes the block. Tokens of the prompt are never replaced.
    """

    edits: ClassVar[bool] = True
    default_threshold: ClassVar[float] = 0.5

    def init_step_state(self) -> tuple[int, ...]:
        """The initial state: 0 rounds since the last position was decided, and 0 for a block that
        is not finished."""
        return (0, 0)

    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """Decides and edits positions in one round; arguments and result as in
        DiffusionAlgorithm."""
        assert states is not None, "an editing algorithm has a state"
        _penalize(batch, logits)
        proposal = batch.propose(logits)
        was_finished = states[:, _FINISHED].astype(bool)
        complete = ~batch.undecided.any(axis=1)
        states[:, _POST_EDIT_STEPS] += complete & ~was_finished
        over = states[:, _POST_EDIT_STEPS] > batch.params.max_post_edit_steps[:, 0]
        edit = ~batch.undecided & ~batch.fixed & (proposal.token_ids != batch.ids)
        edit &= proposal.confidence > batch.params.edit_threshold
        write = (unmask(batch, proposal.confidence) | edit) & ~(was_finished | over)[:, None]
        finished = was_finished | over | ~write.any(axis=1)
        batch.ids[write] = proposal.token_ids[write]
        batch.undecided[write] = False
        states[:, _FINISHED] = finished
        done: BoolArray = finished if batch.report_at_once else was_finished
        return done


def _penalize(batch: BlockBatch, logits: torch.Tensor) -> None:
    """Subtracts the request's penalty, in place, from the logit of the token that a position's
    predecessor in the block holds, which makes repetitions less likely."""
    if not batch.params.penalty.any():
        return
    rows, columns = np.nonzero(batch.scored)
    (edited,) = np.nonzero((columns > 0) & (batch.params.penalty[rows, 0] > 0))
    token_ids = batch.ids[rows[edited], columns[edited] - 1]
    index = (torch.from_numpy(edited), torch.from_numpy(token_ids.astype(np.int64)))
    amounts = torch.from_numpy(-batch.params.penalty[rows[edited], 0])
    device = logits.device
    logits.index_put_(tuple(part.to(device) for part in index), amounts.to(device), accumulate=True)


ALGORITHMS: Final[Mapping[DllmAlgorithm, type[DiffusionAlgorithm]]] = MappingProxyType(
    {"LowConfidence": LowConfidence, "JointThreshold": JointThreshold}
)
