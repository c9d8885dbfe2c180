"""Decides what is confident enough, and at least one position per round."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from worker.rank.diffusion.base import BlockBatch, BoolArray, DiffusionAlgorithm, IntArray


class LowConfidence(DiffusionAlgorithm):
    """Positions above the threshold take their tokens; without any, the most confident one does.

    A block is done on the forward pass that found nothing undecided in it (LLaDA, arXiv 2502.09992;
    dynamic thresholds: Fast-dLLM, arXiv 2505.22618).
    """

    edits: ClassVar[bool] = False
    default_threshold: ClassVar[float] = 0.95

    def step(self, batch: BlockBatch, logits: torch.Tensor, states: IntArray | None) -> BoolArray:
        """See the base class."""
        done: BoolArray = np.logical_not(batch.undecided.any(axis=1))
        proposal = batch.propose(logits)
        take = unmask(batch, proposal.confidence)
        batch.ids[take] = proposal.token_ids[take]
        batch.undecided[take] = False
        return done


def unmask(batch: BlockBatch, confidence: np.ndarray) -> BoolArray:
    """[N, B]: undecided positions above the threshold, or the best one of a block without any."""
    confidence = np.where(batch.undecided, confidence, -1.0)
    take: BoolArray = batch.undecided & (confidence > batch.params.threshold)
    (short,) = np.nonzero(~take.any(axis=1) & batch.undecided.any(axis=1))
    take[short, confidence[short].argmax(axis=1)] = True
    return take
