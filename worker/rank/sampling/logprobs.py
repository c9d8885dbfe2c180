"""Log-probabilities of tokens in the model's raw distribution, before any logits processor.

HAZARD(invariance): the normalizer is a sum of integers, which does not depend on its order, and
`topk` always searches for the same number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels import TokenScores, registry, token_scores
from kernels.sample_tokens.thresholds import WEIGHT_BITS, total_weight
from worker.protocol.messages import TokenLogprobs
from worker.protocol.sampling import MAX_LOGPROBS
from worker.rank.transfer import to_device

PROMPT_BLOCK = 64
"""Number of prompt positions scored at once, which bounds the memory for their logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTokens:
    """Tokens named by requests, which are reported instead of the most likely ones."""

    token_ids: Sequence[Sequence[int]]
    """Tokens of each row; empty for rows that report the most likely ones."""
    values: torch.Tensor
    """[n, k], padded: the tokens (int64) or, in Scores, their logits (fp32)."""


def given_tokens(token_ids: Sequence[Sequence[int]], device: torch.device) -> GivenTokens | None:
    """Named tokens of rows, on the device; None if no row has any."""
    width = max(map(len, token_ids), default=0)
    if not width:
        return None
    padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in token_ids])
    return GivenTokens(token_ids=token_ids, values=to_device(padded, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRows:
    """Rows of a step's logits whose requests return log-probabilities."""

    rows: torch.Tensor
    """[n] int64 on the device: indices of the rows."""
    rows_host: Sequence[int]
    """`rows` as integers on the host."""
    num_top: Sequence[int]
    """Number of most likely tokens to report per row."""
    given: GivenTokens | None = None
    """Named tokens of the rows; None if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """Prompt positions of one Plan row, each of which predicts the next prompt token."""

    index: int
    """Index of the row in the Plan."""
    first_token: int
    """Index of the first position among the step's tokens."""
    first_target: int
    """Cell of the flat token pool with the token that the first position predicts."""
    length: int
    num_top: int
    """Number of most likely tokens to report per position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Terms of the log-probabilities of n tokens, on the device or being copied to the host."""

    tokens: torch.Tensor
    """[n]: the scored tokens."""
    token_logits: torch.Tensor
    """[n]: logits of the scored tokens."""
    best: torch.Tensor
    """[n]: largest logits."""
    weight: torch.Tensor
    """[n]: sums of exp(logit - largest logit) over the vocabulary, in fixed point."""
    rank: torch.Tensor
    """[n]: 1-based ranks of the scored tokens."""
    top_tokens: torch.Tensor
    """[n, k]: the k most likely tokens."""
    top_logits: torch.Tensor
    """[n, k]: logits of the most likely tokens."""
    num_top: Sequence[int]
    """[n]: number of most likely tokens to report."""
    given: GivenTokens | None = None
    """Logits of named tokens; None if there are none."""

    def to_host(self) -> list[TokenLogprobs]:
        """Log-probabilities of each token; waits for the device."""
        # Overflowing logits of a broken checkpoint may result in weights of 0.
        norms = [
            best + math.log(max(weight, 1) / 2**WEIGHT_BITS)
            for best, weight in zip(self.best.tolist(), self.weight.tolist(), strict=True)
        ]
        tokens, logits = self.top_tokens.cpu().numpy(), self.top_logits.cpu().double().numpy()
        # `topk` returns equally likely tokens in any order.
        order = np.lexsort((tokens, -logits), axis=-1)
        tokens = np.take_along_axis(tokens, order, axis=-1)
        logits = np.take_along_axis(logits, order, axis=-1)
        tokens = np.column_stack((self.tokens.cpu().numpy(), tokens))
        logits = np.column_stack((self.token_logits.cpu().double().numpy(), logits))
        with np.errstate(invalid="ignore", over="ignore"):  # as above
            logprobs = (logits - np.array(norms)[:, None]).astype("<f4")
        # Packed row by row: lists of numbers would take three times as long.
        rows = zip(tokens.astype("<i4"), logprobs, self.num_top, self.rank.tolist(), strict=True)
        found = [
            TokenLogprobs(ids[: top + 1].tobytes(), values[: top + 1].tobytes(), rank)
            for ids, values, top, rank in rows
        ]
        if self.given is not None:
            for row, ids in enumerate(self.given.token_ids):
                if ids:
                    own, logits_of = found[row], self.given.values[row, : len(ids)].double()
                    found[row] = TokenLogprobs.pack(
                        [own.token_ids[0], *ids],
                        [own.logprobs[0], *(logits_of - norms[row]).tolist()],
                        own.rank,
                    )
        return found


def score(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: Sequence[int],
    given: GivenTokens | None = None,
) -> Scores:
    """Scores tokens [n] and `given` ones under fp32 logits [n, vocab]; `num_top` as in Scores."""
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    if registry.uses_triton(logits.device):
        scores = token_scores(logits, tokens)
    else:
        token_logits = logits.gather(1, tokens.unsqueeze(1))
        scores = TokenScores(
            token_logits=token_logits.squeeze(1),
            best=top.values[:, 0],
            weight=total_weight(logits),
            rank=_ranks(logits, token_logits, top.values),
        )
    return Scores(
        tokens=tokens,
        token_logits=scores.token_logits,
        best=scores.best,
        weight=scores.weight,
        rank=scores.rank,
        top_tokens=top.indices,
        top_logits=top.values,
        num_top=num_top,
        given=None if given is None else replace(given, values=logits.gather(1, given.values)),
    )


def _ranks(logits: torch.Tensor, token_logits: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Ranks [n]: number of logits in each row >= `token_logits` [n, 1]; `top` [n, k] are the
    largest logits."""
    if logits.is_cuda:  # selecting rows with lower ranks would synchronize
        return (logits >= token_logits).sum(dim=-1)
    ranks = (top >= token_logits).sum(dim=-1)
    (low,) = (token_logits <= top[:, -1:]).squeeze(1).nonzero(as_tuple=True)
    if len(low):
        ranks[low] = (logits[low] >= token_logits[low]).sum(dim=-1)
    return ranks


def score_prompts(
    chunks: Sequence[PromptChunk],
    hidden: torch.Tensor,
    flat_tokens: torch.Tensor,
    compute_logits: Callable[[torch.Tensor, int], torch.Tensor],
) -> dict[int, list[Scores]]:
    """Scores prompt tokens from the step's hidden states [T, hidden]; returns blocks of scores by
    row of the Plan. `compute_logits` receives hidden states and the index of their row.

    Every rank must call this: `compute_logits` is a collective.
    """
    found: dict[int, list[Scores]] = {}
    for chunk in chunks:
        blocks = found[chunk.index] = []
        for start in range(0, chunk.length, PROMPT_BLOCK):
            size = min(PROMPT_BLOCK, chunk.length - start)
            first, target = chunk.first_token + start, chunk.first_target + start
            logits = compute_logits(hidden[first : first + size], chunk.index)
            tokens = flat_tokens[target : target + size].long()
            blocks.append(score(logits, tokens, [chunk.num_top] * size))
    return found
