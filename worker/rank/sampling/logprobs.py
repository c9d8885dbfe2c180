"""Log-probabilities of tokens under the model's own distribution.

HAZARD(invariance): the normaliser is a sum of integers, which does not depend on its order, and
the same number of likeliest tokens is looked up for every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import TokenScores, registry, token_scores
from kernels.sample_tokens.thresholds import WEIGHT_BITS, total_weight
from worker.wire.messages import TokenLogprobs
from worker.wire.sampling import MAX_LOGPROBS

PROMPT_BLOCK = 64
"""Prompt positions scored at once: each takes a row of the whole vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRows:
    """The rows of a step's logits that report log-probabilities."""

    rows: torch.Tensor
    """[n] int64."""
    rows_host: Sequence[int]
    num_top: Sequence[int]
    """Likeliest tokens to report for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """Prompt positions of one Plan row, each of which predicts the next prompt token."""

    index: int
    """Index of the row in the Plan."""
    first_token: int
    """Index of the first position among the step's tokens."""
    first_target: int
    """Cell of the flat token pool that the first one predicts."""
    length: int
    num_top: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The terms of log-probabilities, on the device, [n] each."""

    tokens: torch.Tensor
    own: torch.Tensor
    """Logits of the tokens."""
    best: torch.Tensor
    """Largest logits."""
    weight: torch.Tensor
    """Sum over the vocabulary, in fixed point."""
    rank: torch.Tensor
    top_tokens: torch.Tensor
    """[n, k]"""
    top_logits: torch.Tensor
    num_top: Sequence[int]

    def to_host(self) -> list[TokenLogprobs]:
        """One per token; waits for the device."""
        # A checkpoint that overflows has weights without meaning.
        norms = [
            best + math.log(max(weight, 1) / 2**WEIGHT_BITS)
            for best, weight in zip(self.best.tolist(), self.weight.tolist(), strict=True)
        ]
        tokens, logits = self.top_tokens.cpu().numpy(), self.top_logits.cpu().double().numpy()
        # Of equally likely tokens `topk` names any first.
        order = np.lexsort((tokens, -logits), axis=-1)
        tokens = np.take_along_axis(tokens, order, axis=-1)
        logits = np.take_along_axis(logits, order, axis=-1)
        tokens = np.column_stack((self.tokens.cpu().numpy(), tokens))
        logits = np.column_stack((self.own.cpu().double().numpy(), logits))
        with np.errstate(invalid="ignore"):  # as above
            logprobs = logits - np.array(norms)[:, None]
        columns = tokens.tolist(), logprobs.tolist(), self.num_top, self.rank.tolist()
        return [
            TokenLogprobs.pack(ids[: top + 1], values[: top + 1], rank)
            for ids, values, top, rank in zip(*columns, strict=True)
        ]


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: Sequence[int]) -> Scores:
    """Scores tokens [n] under fp32 logits [n, vocab]."""
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    if registry.uses_triton(logits.device):
        scores = token_scores(logits, tokens)
    else:
        own = logits.gather(1, tokens.unsqueeze(1))
        scores = TokenScores(
            own=own.squeeze(1),
            best=top.values[:, 0],
            weight=total_weight(logits),
            rank=_ranks(logits, own, top.values),
        )
    return Scores(
        tokens=tokens,
        own=scores.own,
        best=scores.best,
        weight=scores.weight,
        rank=scores.rank,
        top_tokens=top.indices,
        top_logits=top.values,
        num_top=num_top,
    )


def _ranks(logits: torch.Tensor, own: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """How many logits of each row are at least its own, [n, 1], given the likeliest, [n, k]."""
    if logits.is_cuda:  # asking which rows need the long way would wait for the device
        return (logits >= own).sum(dim=-1)
    ranks = (top >= own).sum(dim=-1)
    (low,) = (own <= top[:, -1:]).squeeze(1).nonzero(as_tuple=True)
    if len(low):
        ranks[low] = (logits[low] >= own[low]).sum(dim=-1)
    return ranks


def score_prompts(
    chunks: Sequence[PromptChunk],
    hidden: torch.Tensor,
    flat_tokens: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, list[Scores]]:
    """Scores prompt tokens from the step's hidden states [T, hidden], by row of the Plan.

    Every rank must call it: computing logits is a collective operation.
    """
    found: dict[int, list[Scores]] = {}
    for chunk in chunks:
        blocks = found[chunk.index] = []
        for start in range(0, chunk.length, PROMPT_BLOCK):
            size = min(PROMPT_BLOCK, chunk.length - start)
            first, target = chunk.first_token + start, chunk.first_target + start
            logits = compute_logits(hidden[first : first + size])
            tokens = flat_tokens[target : target + size].long()
            blocks.append(score(logits, tokens, [chunk.num_top] * size))
    return found
