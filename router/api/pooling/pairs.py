"""Prompts that score pairs of texts, in the format that each kind of model needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.api.openai.params import MAX_COMPLETIONS
from router.errors import bad_request
from router.tokens.encoder import Prompt, TemplatedPair, TextPair
from worker.protocol.pooling import PoolingInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """The prompts that score pairs of texts."""

    prompts: Sequence[Prompt]
    indices: Sequence[tuple[int, int]]
    """Indices of the two prompts of each pair, for embeddings; empty if each prompt is a pair."""
    add_special_tokens: bool
    """Whether the tokenizer's special tokens are added."""


def check_num_prompts(number: int, field: str) -> None:
    """Raises ApiError (400) if a request has too many texts."""
    if number > MAX_COMPLETIONS:
        raise bad_request(
            f"{field} has {number} texts; the maximum per request is {MAX_COMPLETIONS}", field
        )


def pairs_of(
    info: PoolingInfo, first: Sequence[str], second: Sequence[str], instruction: str | None
) -> Pairs:
    """Pairs one query with each document, or each query with the document at the same index.

    Args:
        info: the model, which determines what a score is: the cosine of two embeddings, the
            logit of a pair, or the answer to a prompt.
        first: queries.
        second: documents.
        instruction: instruction of the prompt; None for the model's default.

    Raises:
        ApiError: 400 if the numbers of texts do not match or are too large, or the model does not
            score pairs.
    """
    if not second or len(first) not in (1, len(second)):
        raise bad_request(
            f"got {len(first)} queries for {len(second)} documents: send one query, or one per "
            "document",
            "documents",
        )
    if instruction is not None and not info.pair_template:
        raise bad_request(
            "this model does not support instruction: remove the field", "instruction"
        )
    check_num_prompts(len(second), "documents")
    queries = list(first) * (len(second) if len(first) == 1 else 1)
    if info.task == "embed":
        places = range(len(first), len(first) + len(second))
        starts = [0] * len(second) if len(first) == 1 else range(len(first))
        return Pairs(
            prompts=[*first, *second],
            indices=list(zip(starts, places, strict=True)),
            add_special_tokens=True,
        )
    if info.pair_template:
        instruction = info.instruction if instruction is None else instruction
        head, _, tail = info.pair_template.partition("{document}")
        prompts = [
            TemplatedPair(
                head.format(instruction=instruction, query=query),
                document,
                tail.format(instruction=instruction, query=query),
            )
            for query, document in zip(queries, second, strict=True)
        ]
        return Pairs(prompts=prompts, indices=(), add_special_tokens=False)
    if info.size > 1:
        raise bad_request(
            f"this model has {info.size} labels, but scoring requires a model with one: use "
            "/classify",
            "model",
        )
    pairs = [TextPair(*pair) for pair in zip(queries, second, strict=True)]
    return Pairs(prompts=pairs, indices=(), add_special_tokens=True)
