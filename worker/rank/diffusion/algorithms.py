"""Block-diffusion algorithms, by their names in `--dllm-algorithm` and in requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np
import torch

from worker.protocol.diffusion import DllmAlgorithm
from worker.rank.diffusion.base import (
    BlockBatch,
    BoolArray,
    Counts,
    DiffusionAlgorithm,
    FloatArray,
    IntArray,
    Proposal,
    lowest,
)
from worker.rank.diffusion.indel import JointThresholdInDel

_POST_EDIT_STEPS, _FINISHED = 0, 1


class Unmasking(DiffusionAlgorithm):
    """Base of the algorithms whose decided positions never change.

    A block is done after the forward pass that starts with no undecided position.
    """

    edits: ClassVar[bool] = False
    default_threshold: ClassVar[float] = 0.95

    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """Decides positions in one round; arguments and result as in DiffusionAlgorithm."""
        done: BoolArray = np.logical_not(batch.undecided.any(axis=1))
        proposal = batch.propose(logits)
        take = self.select(batch, proposal)
        batch.ids[take] = proposal.token_ids[take]
        batch.undecided[take] = False
        return done

    @abstractmethod
    def select(self, batch: BlockBatch, proposal: Proposal) -> BoolArray:
        """Mask [N, B] of the undecided positions to decide: at least one per block that has any."""


class LowConfidence(Unmasking):
    """Decides positions whose confidence is above the threshold or, if there are fewer than the
    round's share of the block, the most confident ones (LLaDA, arXiv 2502.09992; dynamic
    thresholds: Fast-dLLM, arXiv 2505.22618; SDAR's `low_confidence_dynamic`)."""

    def select(self, batch: BlockBatch, proposal: Proposal) -> BoolArray:
        """Positions to decide, as in Unmasking."""
        return unmask(batch, proposal.confidence, _shares(batch))


class LowConfidenceStatic(Unmasking):
    """Decides the most confident positions, as many as each round's share of the block (SDAR's
    `low_confidence_static`)."""

    def select(self, batch: BlockBatch, proposal: Proposal) -> BoolArray:
        """Positions to decide, as in Unmasking."""
        return lowest(-proposal.confidence, batch.undecided, _shares(batch))


class Sequential(Unmasking):
    """Decides positions from left to right, as many as each round's share of the block (SDAR's
    `sequential`)."""

    def select(self, batch: BlockBatch, proposal: Proposal) -> BoolArray:
        """Positions to decide, as in Unmasking."""
        return batch.undecided & (batch.undecided.cumsum(axis=1) <= _shares(batch)[:, None])


class EntropyBounded(Unmasking):
    """Decides positions in ascending order of entropy while the sum of their entropies does not
    exceed a bound, but always at least one (SDAR's `entropy_bounded`; arXiv 2505.24857)."""

    needs_entropy: ClassVar[bool] = True

    def select(self, batch: BlockBatch, proposal: Proposal) -> BoolArray:
        """Positions to decide, as in Unmasking."""
        assert proposal.entropy is not None, "this algorithm needs entropies"
        entropy = np.where(batch.undecided, proposal.entropy, np.inf)
        sums = np.sort(entropy, axis=1).cumsum(axis=1, dtype=np.float64)
        counts = (sums <= batch.params.entropy_bound).sum(axis=1)
        return lowest(entropy, batch.undecided, np.maximum(counts, 1))


def unmask(batch: BlockBatch, confidence: FloatArray, least: Counts | int = 1) -> BoolArray:
    """Mask [N, B] of the positions to decide: undecided ones above the threshold or, if there are
    fewer than `least` [N], the `least` most confident undecided ones. `confidence`: [N, B]."""
    take: BoolArray = batch.undecided & (confidence > batch.params.threshold)
    counts = np.broadcast_to(least, len(take))
    (short,) = np.nonzero(take.sum(axis=1) < counts)
    take[short] = lowest(-confidence[short], batch.undecided[short], counts[short])
    return take


def _shares(batch: BlockBatch) -> Counts:
    """Each block's share of positions in its round, [N]: the block size is distributed as evenly as
    possible over the block's `steps`, with more positions in the first rounds."""
    quotient, remainder = np.divmod(batch.ids.shape[1], batch.params.steps[:, 0])
    shares: Counts = np.maximum(quotient + (batch.rounds < remainder), 1)
    return shares


class JointThreshold(DiffusionAlgorithm):
    """Decides positions if the confidence in the proposed token is above `threshold` (mask to
    token), and replaces decided tokens if that confidence is above `edit_threshold` (token to
    token), as LLaDA 2.1 does.

    Once no position is undecided, editing continues for a limited number of rounds; a round that
    changes nothing finishes the block. Tokens of the prompt are never replaced.
    """

    edits: ClassVar[bool] = True
    default_threshold: ClassVar[float] = 0.5

    def init_step_state(self, block_size: int) -> tuple[int, ...]:
        """The initial state: no rounds since the last position was decided, and not finished."""
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
    """Subtracts the request's penalty, in place, from the logit of the token at the preceding
    position in the block, which makes repetitions less likely."""
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
    {
        "LowConfidence": LowConfidence,
        "LowConfidenceStatic": LowConfidenceStatic,
        "Sequential": Sequential,
        "EntropyBounded": EntropyBounded,
        "JointThreshold": JointThreshold,
        "JointThresholdInDel": JointThresholdInDel,
    }
)
