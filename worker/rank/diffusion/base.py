"""The interface of block-diffusion algorithms: one step over a batch of blocks. To decide a
position means to choose its token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Counts = npt.NDArray[np.signedinteger[Any]]
"""Numbers of positions, one per block."""


class Proposal(NamedTuple):
    """Proposed tokens for the scored positions of a batch, and their probabilities."""

    token_ids: IntArray
    """[N, B]: proposed tokens; meaningless at positions that are not scored."""
    confidence: FloatArray
    """[N, B]: probability of each token; -1 at positions that are not scored."""
    entropy: FloatArray | None
    """[N, B]: entropy, in nats, of the distribution of each token, infinite at positions that are
    not scored; None unless the algorithm `needs_entropy`."""


class EditProposal(NamedTuple):
    """Proposed tokens for the scored positions of a batch whose algorithm deletes and inserts
    tokens, [N, B] each; meaningless at positions that are not scored."""

    token_ids: IntArray
    """Proposed tokens, possibly special ones."""
    confidence: FloatArray
    """Probability of each token; -1 at positions that are not scored."""
    unmasked: IntArray
    """Most likely tokens other than the mask token."""
    unmasked_confidence: FloatArray
    """Probability of each token in `unmasked`."""
    plain: IntArray
    """Most likely tokens that are not special."""


class SpecialTokens(NamedTuple):
    """Tokens that have a meaning for the block, not for the text."""

    mask: int
    """Token of undecided positions."""
    delete: int
    """Token that, if proposed, deletes its position."""
    split: int
    """Token that, if proposed, inserts an undecided position before its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParams:
    """Parameters of an algorithm, [N, 1] each: one value per block, from its request."""

    threshold: FloatArray
    steps: IntArray
    entropy_bound: FloatArray
    edit_threshold: FloatArray
    max_post_edit_steps: IntArray
    penalty: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBatch:
    """N running blocks of B positions each, on the host. A step edits `ids` and `undecided`."""

    ids: IntArray
    """[N, B]: tokens; the mask token if undecided."""
    undecided: BoolArray
    """[N, B]: positions without a token. Not equivalent to `ids` being the mask token, which
    prompts may also contain."""
    fixed: BoolArray
    """[N, B]: positions that have tokens of the prompt."""
    scored: BoolArray
    """[N, B]: positions with logits; the logits are ordered by position, row-major."""
    rounds: npt.NDArray[np.int64]
    """[N]: completed rounds of each block."""
    params: BlockParams
    report_at_once: bool
    """Whether an editing algorithm reports a block as done in the round that changes nothing;
    otherwise, the next round reports it."""
    propose: Callable[[torch.Tensor], Proposal]
    """Proposes one token for each scored position from logits [S, vocab], which it may overwrite.

    The mask token is never proposed. Greedy requests get the most likely token; others get a sample
    from the distribution after temperature, top-k, top-p and min-p, keyed by (seed, position,
    round). Each proposal includes the token's probability in this distribution.
    """
    propose_edits: Callable[[torch.Tensor], EditProposal]
    """Proposes tokens like `propose`, but includes special ones and keeps the logits."""
    histories: Sequence[list[IntArray]]
    """[N]: arrays [2, B] that the algorithm recorded in earlier rounds, in a list per block. The
    algorithm may append to these lists."""
    special: SpecialTokens | None
    """Special tokens of a model that deletes and inserts tokens; otherwise None."""


class DiffusionAlgorithm(ABC):
    """Decides positions of running blocks, round by round. Stateless: blocks carry the state."""

    edits: ClassVar[bool]
    """Whether decided positions may change again."""
    needs_entropy: ClassVar[bool] = False
    """Whether proposals include entropies."""
    default_threshold: ClassVar[float]

    def init_step_state(self, block_size: int) -> tuple[int, ...] | None:
        """State of a block of `block_size` positions before its first round; None for a stateless
        algorithm.

        The state is opaque to callers, which keep it between rounds.
        """
        return None

    @abstractmethod
    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """Runs one round of all blocks.

        Args:
            batch: blocks as computed by the forward pass; edited in place.
            logits: [S, vocab] fp32, of the scored positions.
            states: [N, size of a state], edited in place; None for a stateless algorithm.

        Returns:
            [N]: blocks that are done, for which the keys and values of this forward pass are final.
        """


def lowest(values: FloatArray, undecided: BoolArray, counts: Counts) -> BoolArray:
    """Mask [N, B] of the `counts` [N] undecided positions with the lowest values [N, B]; among
    equal values, the first ones."""
    # Positions whose tokens are all excluded have NaN, which would be sorted after decided
    # positions.
    finite = np.nan_to_num(values, nan=float(np.finfo(np.float32).max))
    order = np.where(undecided, finite, np.inf).argsort(axis=1, kind="stable")
    chosen = np.zeros_like(undecided)
    positions = np.arange(undecided.shape[1])
    np.put_along_axis(chosen, order, positions < counts[:, None], axis=1)
    return chosen & undecided


def scored_positions(
    algorithm: DiffusionAlgorithm, undecided: BoolArray, fixed: BoolArray, *, only_needed: bool
) -> BoolArray:
    """Mask [N, B] of the positions to compute logits for: with `only_needed`, those that a round of
    the algorithm reads, otherwise all."""
    if not only_needed:
        return np.ones_like(undecided)
    return ~fixed if algorithm.edits else undecided
