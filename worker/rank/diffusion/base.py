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
    """One token for each scored position of a batch, and how probable it is."""

    token_ids: IntArray
    """[N, B]; without meaning where nothing is scored."""
    confidence: FloatArray
    """[N, B]; -1 where nothing is scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParams:
    """One number per block, [N, 1] each: a request may bring its own."""

    threshold: FloatArray
    edit_threshold: FloatArray
    max_post_edit_steps: IntArray
    penalty: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBatch:
    """N running blocks of B positions each, on the host. A step edits `ids` and `undecided`."""

    ids: IntArray
    """[N, B]: tokens, the mask token where undecided."""
    undecided: BoolArray
    """[N, B]. Never found out by comparing with the mask token, which a prompt may hold too."""
    fixed: BoolArray
    """[N, B]: positions that hold tokens of the prompt."""
    scored: BoolArray
    """[N, B]: positions that there are logits for, row by row."""
    params: BlockParams
    report_at_once: bool
    """Whether a step of an editing algorithm that changes nothing may report its block as done;
    otherwise the next step does."""
    propose: Callable[[torch.Tensor], Proposal]
    """Makes one token for each scored position of their logits [S, vocab], which it may change.

    The mask token is never proposed. Greedy requests get the likeliest token; others get a draw
    from the distribution that temperature, top-k, top-p and min-p leave, keyed by (seed, position,
    round), and its probability in that distribution."""


class DiffusionAlgorithm(ABC):
    """Decides positions of running blocks, round by round. Has no state of its own."""

    edits: ClassVar[bool]
    """Whether positions that are decided may change again."""
    default_threshold: ClassVar[float]

    def init_step_state(self) -> tuple[int, ...] | None:
        """State of a block before its first step, None for a stateless algorithm.

        It is opaque to everybody else, who keep it and bring it again.
        """
        return None

    @abstractmethod
    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """One round.

        Args:
            batch: blocks as the forward pass saw them; edited in place.
            logits: [S, vocab] fp32, of the scored positions.
            states: [N, numbers of a state]; edited in place.

        Returns:
            [N]: blocks that are done. What the forward pass left in the cache is final for them.
        """


def scored_positions(
    algorithm: DiffusionAlgorithm, undecided: BoolArray, fixed: BoolArray, *, only_needed: bool
) -> BoolArray:
    """Positions whose logits a step of the algorithm reads, or all of them."""
    if not only_needed:
        return np.ones_like(undecided)
    return ~fixed if algorithm.edits else undecided
