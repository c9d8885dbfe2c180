"""From the logits of undecided positions to one token each, and its probability."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kernels import gumbel_noise
from worker.rank.diffusion.base import BoolArray, Proposal
from worker.rank.sampling.sampler import RandomRows, gather_random_rows, masked_logits
from worker.rank.tables import SamplingColumns
from worker.rank.transfer import to_device

_ROUND_STRIDE = np.int64(0x9E3779B97F4A7C15 - 2**64)
"""Odd, so that the draws of different rounds have different keys, modulo 2**64."""


def propose(
    logits: torch.Tensor,
    scored: BoolArray,
    *,
    mask_token_id: int,
    random: RandomRows | None,
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
    columns: SamplingColumns,
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    rounds: npt.NDArray[np.int64],
    device: torch.device,
) -> RandomRows | None:
    """Parameters of scored positions, [S] each; None where all are greedy.

    What a position draws depends on its request's seed, on itself and on the round that its block
    is in, so that it is the same whatever else runs.
    """
    random = gather_random_rows(columns, slots, positions, device)
    if random is None:
        return None
    keys = to_device(torch.from_numpy(rounds * _ROUND_STRIDE), device)
    if random.rows is not None:
        keys = keys.index_select(0, random.rows)
    return replace(random, seeds=random.seeds + keys)


def _choose(logits: torch.Tensor, random: RandomRows | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and probabilities, [S] each.

    HAZARD(invariance): softmax over the last dimension sums each row alone; a plain sum would not.
    """
    if random is not None and random.rows is None:
        return _draw(logits, random)
    tokens = logits.argmax(dim=-1)
    probabilities = _pick(logits.softmax(dim=-1), tokens)
    if random is not None and random.rows is not None:
        drawn, drawn_probabilities = _draw(logits.index_select(0, random.rows), random)
        tokens.index_copy_(0, random.rows, drawn)
        probabilities.index_copy_(0, random.rows, drawn_probabilities)
    return tokens, probabilities


def _draw(logits: torch.Tensor, random: RandomRows) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = masked_logits(logits, random)
    noise = gumbel_noise(random.seeds, random.positions, logits.shape[-1])
    tokens = noise.add_(scaled).argmax(dim=-1)
    return tokens, _pick(scaled.softmax(dim=-1), tokens)


def _pick(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1)
