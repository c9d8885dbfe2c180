"""Block diffusion without caches and batches: every round computes the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Token ids of whole blocks to logits [positions, vocab], with a block-causal mask."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    algorithm: str = "LowConfidence"
    threshold: float = 0.95
    edit_threshold: float = 0.0
    max_post_edit_steps: int = 16
    penalty: float = 0.0


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """Number of passes by block in which tokens were decided or edited."""
    margin: float = 1.0
    """Minimum distance of a confidence from the threshold that it was compared with."""


def answer(
    logits: Logits,
    prompt: Sequence[int],
    *,
    block_size: int,
    mask: int,
    max_tokens: int,
    terms: Terms,
    ends: Sequence[int] = (),
) -> Answer:
    """All blocks of one request; blocks are completed and truncated afterwards."""
    result = Answer()
    known = list(prompt)
    while True:
        start = len(known) // block_size * block_size
        lead = len(known) - start
        block: list[int | None] = [*known[start:], *[None] * (block_size - lead)]
        decided = _decide(logits, known[:start], block, lead, mask, terms, result)
        known = known[:start] + decided
        for token in decided[lead:]:
            result.token_ids.append(token)
            if token in ends or len(result.token_ids) == max_tokens:
                return result


def _decide(
    logits: Logits,
    before: list[int],
    block: list[int | None],
    lead: int,
    mask: int,
    terms: Terms,
    result: Answer,
) -> list[int]:
    rounds = num_post_edits = 0
    while True:
        ids = [mask if token is None else token for token in block]
        is_open = None in block
        if not is_open and terms.algorithm == "LowConfidence":
            break
        scores = logits([*before, *ids])[-len(block) :].clone()
        if terms.penalty:
            for place in range(1, len(block)):
                scores[place, ids[place - 1]] -= terms.penalty
        scores[:, mask] = -torch.inf
        best = scores.softmax(-1).max(-1)
        confidence, tokens = best.values.tolist(), best.indices.tolist()
        rounds += 1
        writes: list[int] = []
        if is_open:
            places = [place for place, token in enumerate(block) if token is None]
            result.margin = min(
                [result.margin, *(abs(confidence[place] - terms.threshold) for place in places)]
            )
            writes = [place for place in places if confidence[place] > terms.threshold]
            writes = writes or [max(places, key=lambda place: confidence[place])]
        elif terms.algorithm == "JointThreshold":
            num_post_edits += 1
            if num_post_edits > terms.max_post_edit_steps:
                break
        if terms.algorithm == "JointThreshold":
            writes += [
                place
                for place in range(lead, len(block))
                if block[place] is not None
                and tokens[place] != block[place]
                and confidence[place] > terms.edit_threshold
            ]
            if not writes:
                break
        for place in writes:
            block[place] = tokens[place]
    result.rounds.append(rounds)
    return [token for token in block if token is not None]
