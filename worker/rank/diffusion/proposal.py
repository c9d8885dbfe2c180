"""Proposals for scored positions: a token, its probability, and the entropy of the distribution
from which it was chosen, computed from the position's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels import SamplingParameters, gumbel_noise
from kernels.sample_tokens import GREEDY_BELOW
from kernels.sample_tokens.reference import masked_logits
from worker.rank.diffusion.base import BoolArray, EditProposal, Proposal, SpecialTokens
from worker.rank.sampling.state import SamplingState

ROUND_STRIDE = np.int64(0x9E3779B97F4A7C15 - 2**64)
"""Difference between the keys of two successive rounds. Odd, so that keys do not repeat modulo
2**64."""


def propose(
    logits: torch.Tensor,
    scored: BoolArray,
    *,
    mask_token_id: int,
    random: SamplingParameters | None,
    with_entropy: bool = False,
) -> Proposal:
    """Proposes one token for each of the S scored positions.

    Args:
        logits: [S, vocab] fp32 of the scored positions, in row-major order; overwritten.
        scored: [N, B]: mask of the S scored positions.
        mask_token_id: the mask token, which is never proposed.
        random: sampling parameters [S] of the positions; None if all are greedy.
        with_entropy: whether to compute entropies.
    """
    token_ids = np.zeros(scored.shape, dtype=np.int32)
    confidence = np.full(scored.shape, -1.0, dtype=np.float32)
    entropy = np.full(scored.shape, np.inf, dtype=np.float32) if with_entropy else None
    if len(logits):
        logits[:, mask_token_id] = -torch.inf
        tokens, shares = choose(logits, random)
        columns = [tokens, shares.gather(1, tokens.unsqueeze(1)).squeeze(1)]
        if with_entropy:
            columns.append(entropies(shares))
        found = torch.stack([column.double() for column in columns]).cpu().numpy()
        token_ids[scored] = found[0].astype(np.int32)
        confidence[scored] = found[1].astype(np.float32)
        if entropy is not None:
            entropy[scored] = found[2].astype(np.float32)
    return Proposal(token_ids, confidence, entropy)


def propose_edits(
    logits: torch.Tensor,
    scored: BoolArray,
    special: SpecialTokens | None,
    random: SamplingParameters | None,
) -> EditProposal:
    """Proposes tokens, including special ones, for each of the S scored positions. Arguments as in
    `propose`, but `logits` is not modified."""
    assert special is not None, "the model has tokens for deletion and insertion"
    found = [np.zeros(scored.shape, dtype=np.int32) for _ in range(3)]
    confidence, unmasked_confidence = (
        np.full(scored.shape, -1.0, dtype=np.float32) for _ in range(2)
    )
    if len(logits):
        tokens, shares = choose(logits, random)
        kept = logits.clone()
        kept[:, special.mask] = -torch.inf
        unmasked = kept.argmax(dim=-1)
        kept[:, list(special)] = -torch.inf
        columns = [tokens, unmasked, kept.argmax(dim=-1)]
        columns += [shares.gather(1, one.unsqueeze(1)).squeeze(1) for one in (tokens, unmasked)]
        values = torch.stack([column.double() for column in columns]).cpu().numpy()
        for tokens_of, row in zip(found, values, strict=False):
            tokens_of[scored] = row.astype(np.int32)
        confidence[scored], unmasked_confidence[scored] = values[3:].astype(np.float32)
    return EditProposal(found[0], confidence, found[1], unmasked_confidence, found[2])


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
    return state.parameters(slots, positions, keys=rounds * ROUND_STRIDE)


def entropies(shares: torch.Tensor) -> torch.Tensor:
    """Entropies [S], in nats, of distributions [S, vocab].

    HAZARD(invariance): a plain sum over the vocabulary would depend on the number of rows.
    """
    sums: torch.Tensor = torch.special.entr(shares).cumsum(dim=-1)
    return sums[:, -1]


def choose(
    logits: torch.Tensor, random: SamplingParameters | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen tokens [S], and the distributions [S, vocab] from which they are chosen.

    HAZARD(invariance): softmax over the last dimension sums each row separately; a plain sum does
    not.
    """
    tokens = logits.argmax(dim=-1)
    if random is not None:
        is_greedy = random.temperature < GREEDY_BELOW
        logits = masked_logits(logits, random)
        noise = gumbel_noise(random.seeds, random.positions, logits.shape[-1])
        tokens = torch.where(is_greedy, tokens, noise.add_(logits).argmax(dim=-1))
    return tokens, logits.softmax(dim=-1)
