"""Block diffusion without caches or batches: every round computes the whole sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.support.engines.indel_oracle import Moves, decide

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Function from token ids of whole blocks to logits [positions, vocab], with a block-causal
mask."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    algorithm: str = "LowConfidence"
    threshold: float = 0.95
    steps: int | None = None
    entropy_bound: float | None = None
    edit_threshold: float = 0.0
    max_post_edit_steps: int = 16
    penalty: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Processors:
    """Logits processors; fields are named as in SamplingParams."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token in the round in which it was decided."""
    rounds: list[int] = field(default_factory=list)
    """Number of passes per block in which tokens were decided or edited."""
    margin: float = 1.0
    """Minimum distance of a confidence, or a sum of entropies, from the threshold that it was
    compared with."""


def answer(
    logits: Logits,
    prompt: Sequence[int],
    *,
    block_size: int,
    mask: int,
    max_tokens: int,
    terms: Terms,
    ends: Sequence[int] = (),
    processors: Processors | None = None,
    moves: Moves | None = None,
) -> Answer:
    """Generates all blocks of one request. Blocks are completed, and truncated afterwards."""
    result = Answer()
    known = list(prompt)
    while True:
        start = len(known) // block_size * block_size
        lead = len(known) - start
        block: list[int | None] = [*known[start:], *[None] * (block_size - lead)]
        if terms.algorithm == "JointThresholdInDel":
            assert moves is not None
            decided, rounds = decide(
                partial(_of_block, logits, known[:start]),
                *(block, lead, moves),
                threshold=terms.threshold,
                edit_threshold=terms.edit_threshold,
                most_edits=terms.max_post_edit_steps,
            )
            result.rounds.append(rounds)
            known = known[:start] + decided
            result.token_ids += decided[lead:]
            ended = [place for place, token in enumerate(result.token_ids, 1) if token in ends]
            count = min([max_tokens, *ended])
            if count <= len(result.token_ids):
                del result.token_ids[count:]
                return result
            continue
        process = partial(process_block, processors, prompt, known[:start], lead, ends)
        decided, logprobs = _decide(
            logits, known[:start], block, lead, mask, terms, process, result
        )
        known = known[:start] + decided
        for token, logprob in zip(decided[lead:], logprobs[lead:], strict=True):
            result.token_ids.append(token)
            result.logprobs.append(logprob)
            if token in ends or len(result.token_ids) == max_tokens:
                return result


def _of_block(logits: Logits, before: list[int], ids: Sequence[int]) -> torch.Tensor:
    return logits([*before, *ids])[-len(ids) :]


def process_block(
    processors: Processors | None,
    prompt: Sequence[int],
    before: list[int],
    lead: int,
    ends: Sequence[int],
    scores: torch.Tensor,
    block: list[int | None],
) -> None:
    """Edits scores [block, vocab]; every token to the left of a position counts."""
    if processors is None:
        return
    for place in range(lead, len(block)):
        if processors.allowed_token_ids is not None:
            others = {*range(scores.shape[1])} - {*processors.allowed_token_ids}
            scores[place, list(others)] = -torch.inf
        for token, bias in processors.logit_bias.items():
            scores[place, token] += bias
        output = [*before, *block[:place]][len(prompt) :]
        counts = Counter(token for token in output if token is not None)
        for token in {*prompt, *counts}:
            value, factor = float(scores[place, token]), processors.repetition_penalty
            value = value / factor if value > 0 else value * factor
            value -= processors.frequency_penalty * counts[token]
            scores[place, token] = value - processors.presence_penalty * (counts[token] > 0)
        if len(before) + place - len(prompt) < processors.min_tokens:
            scores[place, list(ends)] = -torch.inf


def _share(terms: Terms, size: int, rounds: int) -> int:
    """Number of positions that a round decides, for algorithms with a fixed number."""
    steps = terms.steps or size
    return max(1, size // steps + (rounds < size % steps))


def _select(
    terms: Terms, places: list[int], shares: torch.Tensor, share: int, result: Answer
) -> list[int]:
    """Open positions that a round decides."""
    confidence = {place: float(shares[place].max()) for place in places}
    ranked = sorted(places, key=lambda place: -confidence[place])
    if terms.algorithm == "Sequential":
        return places[:share]
    if terms.algorithm == "LowConfidenceStatic":
        if share < len(ranked):
            gap = confidence[ranked[share - 1]] - confidence[ranked[share]]
            result.margin = min(result.margin, gap or 1.0)
        return ranked[:share]
    if terms.algorithm == "EntropyBounded":
        entropy = {
            place: float(torch.special.entr(shares[place].double()).sum()) for place in places
        }
        chosen: list[int] = []
        total, bound = 0.0, 0.35 if terms.entropy_bound is None else terms.entropy_bound
        for place in sorted(places, key=lambda place: entropy[place]):
            total += entropy[place]
            result.margin = min(result.margin, abs(total - bound))
            if total > bound and chosen:
                break
            chosen.append(place)
        return chosen
    gaps = [abs(confidence[place] - terms.threshold) for place in places]
    result.margin = min([result.margin, *gaps])
    above = [place for place in places if confidence[place] > terms.threshold]
    return above if len(above) >= min(share, len(places)) else ranked[:share]


def _decide(
    logits: Logits,
    before: list[int],
    block: list[int | None],
    lead: int,
    mask: int,
    terms: Terms,
    process: Callable[[torch.Tensor, list[int | None]], None],
    result: Answer,
) -> tuple[list[int], list[float]]:
    rounds = num_post_edits = 0
    logprobs = [0.0] * len(block)
    while True:
        ids = [mask if token is None else token for token in block]
        is_open = None in block
        if not is_open and terms.algorithm != "JointThreshold":
            break
        raw = logits([*before, *ids])[-len(block) :]
        scores = raw.clone()
        process(scores, block)
        if terms.penalty:
            for place in range(1, len(block)):
                scores[place, ids[place - 1]] -= terms.penalty
        scores[:, mask] = -torch.inf
        shares = scores.softmax(-1)
        confidence, tokens = (part.tolist() for part in shares.max(-1))
        share, rounds = _share(terms, len(block), rounds), rounds + 1
        writes: list[int] = []
        if is_open:
            places = [place for place, token in enumerate(block) if token is None]
            writes = _select(terms, places, shares, share, result)
        else:
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
            logprobs[place] = float(raw[place].log_softmax(-1)[tokens[place]])
    result.rounds.append(rounds)
    return [token for token in block if token is not None], logprobs
