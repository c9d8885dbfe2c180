"""Proposals: one token for each scored position, and its probability, from its logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels import SamplingParameters, gumbel_noise
from kernels.sample_tokens import GREEDY_BELOW
from kernels.sample_tokens.reference import masked_logits
from worker.rank.diffusion.base import BoolArray, Proposal
from worker.rank.sampling.state import SamplingState

_ROUND_STRIDE = np.int64(0x9E3779B97F4A7C15 - 2**64)
"""Difference of the keys of two successive rounds. Odd, so that keys do not repeat modulo
2**64."""


def propose(
    logits: torch.Tensor,
    scored: BoolArray,
    *,
    mask_token_id: int,
    random: SamplingParameters | None,
) -> Proposal:
    """Proposes one token for each of the S scored positions.

    Args:
        logits: [S, vocab] fp32 of the scored positions, in row-major order; overwritten.
        scored: [N, B]: mask of the S scored positions.
        mask_token_id: the mask token, which is never proposed.
        random: sampling parameters [S] of the positions; None if all are greedy.
    """
    token_ids = np.zeros(scored.shape, dtype=np.int32)
    confidence = np.full(scored.shape, -1.0, dtype=np.float32)
    if len(logits):
        logits[:, mask_token_id] = -torch.inf
        tokens, probabilities = _choose(logits, random)
        found = torch.stack((tokens.double(), probabilities.double())).cpu().numpy()
        token_ids[scored] = found[0].astype(np.int32)
        confidence[scored] = found[1].astype(np.float32)
    return Proposal(token_ids, confidence)


def random_positions(
    state: SamplingState,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    rounds: npt.NDArray[np.int64],
) -> SamplingParameters | None:
    """Sampling parameters of scored positions, [S] each; None if all are greedy.

    A sample is keyed by the request's seed, the position and the round of its block (`slots`,
    `positions` and `rounds`, [S] each), so it does not depend on the rest of the batch.
    """
    return state.parameters(slots, positions, keys=rounds * _ROUND_STRIDE)


def _choose(
    logits: torch.Tensor, random: SamplingParameters | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen tokens and their probabilities, [S] each.

    HAZARD(invariance): softmax over the last dimension sums each row separately; a plain sum would
    not.
    """
    tokens = logits.argmax(dim=-1)
    if random is not None:
        is_greedy = random.temperature < GREEDY_BELOW
        logits = masked_logits(logits, random)
        noise = gumbel_noise(random.seeds, random.positions, logits.shape[-1])
        tokens = torch.where(is_greedy, tokens, noise.add_(logits).argmax(dim=-1))
    return tokens, logits.softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
