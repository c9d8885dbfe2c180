"""The interface of block-diffusion algorithms: one step over a batch of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class Proposal(NamedTuple):
    """Proposed tokens for the scored positions of a batch, and their probabilities."""

    token_ids: IntArray
    """[N, B]; meaningless at positions that are not scored."""
    confidence: FloatArray
    """[N, B]: probability of each token; -1 at positions that are not scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParams:
    """Parameters of an algorithm, [N, 1] each: one value per block, from its request."""

    threshold: FloatArray
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
    prompts may contain, too."""
    fixed: BoolArray
    """[N, B]: positions that hold tokens of the prompt."""
    scored: BoolArray
    """[N, B]: positions that have logits, which are in row-major order."""
    params: BlockParams
    report_at_once: bool
    """Whether a round of an editing algorithm that changes nothing reports its block as done; if
    not, the next round reports it."""
    propose: Callable[[torch.Tensor], Proposal]
    """Proposes one token for each scored position from logits [S, vocab], which it may overwrite.

    The mask token is never proposed. Greedy requests get the most likely token; others get a sample
    from the distribution after temperature, top-k, top-p and min-p, keyed by (seed, position,
    round), and its probability in that distribution.
    """


class DiffusionAlgorithm(ABC):
    """Decides positions of running blocks, round by round. Stateless: blocks carry the state."""

    edits: ClassVar[bool]
    """Whether decided positions may change again."""
    default_threshold: ClassVar[float]

    def init_step_state(self) -> tuple[int, ...] | None:
        """State of a block before its first round; None for a stateless algorithm.

        Opaque to callers, which keep it between rounds.
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


def scored_positions(
    algorithm: DiffusionAlgorithm, undecided: BoolArray, fixed: BoolArray, *, only_needed: bool
) -> BoolArray:
    """Mask [N, B] of the positions to compute logits for: with `only_needed` those that a round of
    the algorithm reads, else all."""
    if not only_needed:
        return np.ones_like(undecided)
    return ~fixed if algorithm.edits else undecided
