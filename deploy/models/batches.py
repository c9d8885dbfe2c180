"""Padded batches of tokens from conversations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Final, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deploy.models.corpus import Conversation
from deploy.models.tokenizer import PADDING, segments

_POOL_SIZE: Final = 512


class Batch(NamedTuple):
    """Conversations of similar length, padded on the right."""

    input_ids: Tensor
    """[batch, length] int64: token ids."""
    is_target: Tensor
    """[batch, length] bool: whether the model must generate the token at this position."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.is_target.sum())


class Document(NamedTuple):
    """A conversation's tokens, and for each whether the model must generate it."""

    ids: list[int]
    is_target: list[bool]


def training_batches(
    rng: Random,
    conversations: Iterator[Conversation],
    tokenizer: Tokenizer,
    num_tokens: int,
    max_length: int,
) -> Iterator[Batch]:
    """Infinite stream of batches of at most ``num_tokens`` positions, including padding.

    Each conversation starts at position 0. A causal model needs no mask for right padding.
    """
    padding = tokenizer.token_to_id(PADDING)
    assert padding is not None, "the tokenizer lacks its padding token"
    while True:
        pool = encode(tokenizer, list(islice(conversations, _POOL_SIZE)), max_length)
        groups = list(_group_by_length(pool, num_tokens))
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, padding)


def encode(
    tokenizer: Tokenizer, conversations: list[Conversation], max_length: int
) -> list[Document]:
    """Tokens of each conversation, truncated to ``max_length``."""
    pieces = [list(segments(conversation)) for conversation in conversations]
    encoded = iter(tokenizer.encode_batch([text for parts in pieces for text, _ in parts]))
    documents = []
    for parts in pieces:
        ids: list[int] = []
        is_target: list[bool] = []
        for _, produced in parts:
            piece = next(encoded).ids
            ids += piece
            is_target += [produced] * len(piece)
        documents.append(Document(ids[:max_length], is_target[:max_length]))
    return documents


def _group_by_length(pool: list[Document], num_tokens: int) -> Iterator[list[Document]]:
    group: list[Document] = []
    for document in sorted(pool, key=lambda document: len(document.ids)):
        if group and (len(group) + 1) * len(document.ids) > num_tokens:
            yield group
            group = []
        group.append(document)
    if group:
        yield group


def _pad(group: list[Document], padding: int) -> Batch:
    shape = (len(group), max(len(document.ids) for document in group))
    input_ids = torch.full(shape, padding, dtype=torch.long)
    is_target = torch.zeros(shape, dtype=torch.bool)
    for row, document in enumerate(group):
        input_ids[row, : len(document.ids)] = torch.tensor(document.ids)
        is_target[row, : len(document.ids)] = torch.tensor(document.is_target)
    return Batch(input_ids, is_target)
