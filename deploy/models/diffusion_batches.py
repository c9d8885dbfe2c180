"""Batches for block diffusion: clean text and noisy copies of blocks.

A row has a conversation's clean tokens, followed by noisy copies of the blocks that contain parts
of answers. Each copy keeps the positions of its block. A clean token attends to all blocks up to
its own. A noisy token attends to its own copy and to the clean blocks before it, like a running
block in serving (Block Diffusion, arXiv 2503.09573).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deploy.models.batches import Document, encode
from deploy.models.corpus import training_conversations
from deploy.models.tokenizer import MASK, PADDING, TURN_END

_POOL_SIZE: Final = 512
_LEAST_NOISE: Final = 0.15
_ALL_MASKED_SHARE: Final = 0.15
"""Fraction of the copies that are fully masked, as at the start of each block in serving."""
_NUM_COPIES: Final = 3
"""Number of copies per block, each with its own masked positions. They share the computation of the
clean text."""
_CLEAN: Final = 0
_NOT_THERE: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionBatch:
    """Rows of clean and noisy tokens, padded on the right."""

    input_ids: Tensor
    """[batch, length] int64: token ids."""
    positions: Tensor
    """[batch, length] int64: positions in the conversation; a copy has the positions of its block.
    """
    visible: Tensor
    """[batch, 1, length, length] bool: whether a token (third dimension) attends to another (last
    dimension)."""
    labels: Tensor
    """[batch, length] int64: original tokens of masked positions."""
    is_masked: Tensor
    """[batch, length] bool: tokens that the model must predict."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.is_masked.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    ids: list[int]
    positions: list[int]
    labels: list[int]
    is_masked: list[bool]
    copy: list[int]
    """1-based number of the noisy copy that each position belongs to; 0 for clean text."""


def diffusion_batches(
    rng: Random, tokenizer: Tokenizer, num_tokens: int, max_length: int, block_size: int
) -> Iterator[DiffusionBatch]:
    """Infinite stream of batches of at most ``num_tokens`` positions, including padding."""
    ids = {name: tokenizer.token_to_id(name) for name in (PADDING, TURN_END, MASK)}
    conversations = training_conversations(rng)
    while True:
        documents = encode(tokenizer, list(islice(conversations, _POOL_SIZE)), max_length)
        masker = _Masker(rng, block_size, end=ids[TURN_END], mask=ids[MASK])
        rows = [masker.row(document) for document in documents]
        groups = list(_group_by_length(rows, num_tokens))
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, ids[PADDING], block_size)


class _Masker:
    """Adds noisy copies of blocks to conversations.

    Args:
        rng: random generator of the masks.
        block_size: positions per block.
        end: token that ends an answer and fills the rest of its last block.
        mask: mask token.
    """

    def __init__(self, rng: Random, block_size: int, *, end: int, mask: int) -> None:
        self._rng = rng
        self._block_size = block_size
        self._end = end
        self._mask = mask

    def row(self, document: Document) -> _Row:
        """The document, with copies of each block that contains part of an answer.

        If a block contains parts of two answers, one of them is chosen.
        """
        row = _Row(
            ids=list(document.ids),
            positions=list(range(len(document.ids))),
            labels=list(document.ids),
            is_masked=[False] * len(document.ids),
            copy=[_CLEAN] * len(document.ids),
        )
        by_block: dict[int, list[tuple[int, int]]] = {}
        for start, stop in _runs(document.is_target):
            for block in range(start // self._block_size, (stop - 1) // self._block_size + 1):
                by_block.setdefault(block, []).append((start, stop))
        for block, answers in by_block.items():
            for _ in range(_NUM_COPIES):
                self._add_copy(row, document.ids, block, *self._rng.choice(answers))
        return row

    def _add_copy(self, row: _Row, ids: list[int], block: int, start: int, stop: int) -> None:
        first = block * self._block_size
        places = range(first, first + self._block_size)
        labels = [ids[place] if place < stop else self._end for place in places]
        noise = self._rng.uniform(_LEAST_NOISE, 1.0)
        if self._rng.random() < _ALL_MASKED_SHARE:
            noise = 1.0
        masked = [place >= start and self._rng.random() < noise for place in places]
        if not any(masked):
            masked[self._rng.randrange(max(start - first, 0), self._block_size)] = True
        row.ids.extend(
            self._mask if is_masked else label
            for is_masked, label in zip(masked, labels, strict=True)
        )
        row.positions.extend(places)
        row.labels.extend(labels)
        row.is_masked.extend(masked)
        row.copy.extend([row.copy[-1] + 1] * self._block_size)


def _runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each stretch of true flags."""
    start = None
    for place, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            yield start, place
            start = None


def _group_by_length(rows: list[_Row], num_tokens: int) -> Iterator[list[_Row]]:
    group: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if group and (len(group) + 1) * len(row.ids) > num_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _pad(group: list[_Row], padding: int, block_size: int) -> DiffusionBatch:
    shape = (len(group), max(len(row.ids) for row in group))
    input_ids = torch.full(shape, padding, dtype=torch.long)
    positions, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    is_masked = torch.zeros(shape, dtype=torch.bool)
    copy = torch.full(shape, _NOT_THERE)
    for index, row in enumerate(group):
        length = len(row.ids)
        input_ids[index, :length] = torch.tensor(row.ids)
        positions[index, :length] = torch.tensor(row.positions)
        labels[index, :length] = torch.tensor(row.labels)
        is_masked[index, :length] = torch.tensor(row.is_masked)
        copy[index, :length] = torch.tensor(row.copy)
    return DiffusionBatch(
        input_ids=input_ids,
        positions=positions,
        visible=_visible(copy, positions // block_size),
        labels=labels,
        is_masked=is_masked,
    )


def _visible(copy: Tensor, block: Tensor) -> Tensor:
    """Attention mask, computed from each position's copy and block."""
    query, key = copy.unsqueeze(2), copy.unsqueeze(1)
    before = block.unsqueeze(1) < block.unsqueeze(2)
    same = block.unsqueeze(1) == block.unsqueeze(2)
    clean_sees = (query == _CLEAN) & (key == _CLEAN) & (before | same)
    noisy_sees = (query > _CLEAN) & (((key == _CLEAN) & before) | (key == query))
    itself = torch.eye(copy.shape[1], dtype=torch.bool)  # a softmax row must not be empty
    return (clean_sees | noisy_sees | itself).unsqueeze(1)
