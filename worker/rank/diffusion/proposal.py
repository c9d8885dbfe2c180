"""Proposals: one token for each undecided position, and its probability, from its logits."""

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
"""Odd, so that the draws of different rounds have different keys, modulo 2**64."""


def propose(
    logits: torch.Tensor,
    scored: BoolArray,
    *,
    mask_token_id: int,
    random: SamplingParameters | None,
) -> Proposal:
    """One token for each of the S positions in `scored` [N, B].

    Args:
        logits: [S, vocab] fp32; changed.
        scored: where they belong, row by row.
        mask_token_id: never proposed.
        random: parameters of the positions that draw; None where all are greedy.
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
    """Parameters of scored positions, [S] each; None where all are greedy.

    What a position draws depends on its request's seed, on itself and on the round that its block
    is in, so that it is the same whatever else runs.
    """
    return state.parameters(slots, positions, keys=rounds * _ROUND_STRIDE)


def _choose(
    logits: torch.Tensor, random: SamplingParameters | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and probabilities, [S] each.

    HAZARD(invariance): softmax over the last dimension sums each row alone; a plain sum would not.
    """
    tokens = logits.argmax(dim=-1)
    if random is not None:
        is_greedy = random.temperature < GREEDY_BELOW
        logits = masked_logits(logits, random)
        noise = gumbel_noise(random.seeds, random.positions, logits.shape[-1])
        tokens = torch.where(is_greedy, tokens, noise.add_(logits).argmax(dim=-1))
    return tokens, logits.softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
