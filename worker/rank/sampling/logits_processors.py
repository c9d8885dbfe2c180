"""Logits processors of requests: tables on the device with one entry per slot.

A table sets a slot's entry when a request is admitted, gathers the rows of a step that it edits,
and edits their logits in one launch. Token ids beyond the vocabulary are ignored, since they
cannot be sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels import (
    EditRows,
    PenaltyRows,
    TokenEdits,
    apply_penalties_,
    apply_token_bitmask,
    apply_token_edits_,
    count_tokens_,
)
from worker.plan.plan import LogitsParams
from worker.protocol.sampling import MAX_BAD_WORDS_TOKENS, MAX_LOGIT_BIASES
from worker.rank.transfer import to_device

_WORD = 32
_MAX_LONG_WORDS = MAX_BAD_WORDS_TOKENS // 2
"""Maximum number of bad words with several tokens; those with one token are in the masks."""


class SampledRow(NamedTuple):
    """One sampled token of a request with logits processors or log-probabilities."""

    sample: int
    """Index of the sample, which is also its row in the logits."""
    slot: int
    end: int
    """Position of the new token."""
    params: LogitsParams
    num_drafts: int
    """Number of tokens before the new one that penalties do not count yet: drafts in its row or, in
    block diffusion, tokens in its block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMaskRows:
    """Masked rows of a step's logits, int64 [n] each."""

    rows: torch.Tensor
    """Rows of the logits."""
    mask_rows: torch.Tensor
    """Rows of the mask table."""


class TokenMaskTable:
    """Two bitmasks per slot: one for the first `min_tokens` output tokens, and one for all later
    ones.

    Both mask disallowed tokens and bad words with one token; the first one also masks stop tokens.

    Args:
        num_rows: number of slots, including the dummy slot.
        vocab_size: number of tokens that can be sampled.
        device: device of the masks.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._shape = (2 * num_rows, -(-vocab_size // _WORD))
        self._device = device
        # Allocated for the first request that needs it: on most servers, none does.
        self._masks: torch.Tensor | None = None
        self._min_tokens: dict[int, int] = {}
        """`min_tokens` of the slots that have masks."""

    def admit(self, slot: int, params: LogitsParams) -> None:
        """Replaces the slot's masks."""
        self._min_tokens.pop(slot, None)
        bad = [word[0] for word in params.bad_words if len(word) == 1]
        early = params.stop_token_ids if params.min_tokens else ()
        if not (params.allowed_token_ids or bad or early):
            return
        if self._masks is None:
            self._masks = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        allowed = self._flags(np.frombuffer(params.allowed_token_ids, dtype="<i4"))
        if not allowed.any():
            allowed[:] = True
        late = allowed & ~self._flags(bad)
        masks = np.stack([_pack(late & ~self._flags(early)), _pack(late)])
        self._masks[2 * slot : 2 * slot + 2] = to_device(torch.from_numpy(masks), self._device)
        self._min_tokens[slot] = params.min_tokens

    def gather(self, sampled: Sequence[SampledRow]) -> TokenMaskRows | None:
        """The rows of `sampled` that have masks; None if there are none."""
        found = []
        for row in sampled:
            if (least := self._min_tokens.get(row.slot)) is not None:
                is_late = row.end - row.params.num_prompt >= least
                found.append((row.sample, 2 * row.slot + is_late))
        if not found:
            return None
        rows, mask_rows = _columns(found, self._device)
        return TokenMaskRows(rows=rows, mask_rows=mask_rows)

    def apply(self, logits: torch.Tensor, rows: TokenMaskRows) -> None:
        """Masks logits [S, vocab] in place."""
        assert self._masks is not None, "masked rows come from an admission"
        apply_token_bitmask(logits, self._masks, rows=rows.rows, mask_rows=rows.mask_rows)

    def _flags(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """bool [vocab]: whether each token is in `token_ids`; ids beyond the vocabulary are
        ignored."""
        flags = np.zeros(self._vocab_size, dtype=np.bool_)
        ids = np.asarray(token_ids, dtype=np.int32)
        flags[ids[ids < self._vocab_size]] = True
        return flags


class _Edits(NamedTuple):
    """Sizes of a slot's edits."""

    num_prompt: int
    """Number of prompt tokens, which are not matched against bad words."""
    num_biases: int
    num_words: int


class TokenEditTable:
    """Logit biases, and bad words with several tokens, by slot.

    Each slot has room for the maximum number of edits of a request (MAX_LOGIT_BIASES,
    MAX_BAD_WORDS_TOKENS), so that requests affect neither the size of the table nor the work for
    other requests.

    Args:
        num_rows: number of slots, including the dummy slot.
        token_stride: cells per slot in the flat token pool.
        vocab_size: number of tokens that can be sampled.
        device: device of the table.
    """

    def __init__(
        self, *, num_rows: int, token_stride: int, vocab_size: int, device: torch.device
    ) -> None:
        self._num_rows = num_rows
        self._token_stride = token_stride
        self._vocab_size = vocab_size
        self._device = device
        # Allocated for the first request that needs it: on most servers, none does.
        self._edits: TokenEdits | None = None
        self._slots: dict[int, _Edits] = {}
        """Sizes of the edits of the slots that have any."""

    @staticmethod
    def num_bytes(num_rows: int) -> int:
        """Size of the table with `num_rows` slots, in bytes."""
        return num_rows * 4 * (2 * MAX_LOGIT_BIASES + MAX_BAD_WORDS_TOKENS + _MAX_LONG_WORDS)

    def admit(self, slot: int, params: LogitsParams) -> None:
        """Replaces the slot's edits, whose counts are checked in `worker.protocol.limits`."""
        self._slots.pop(slot, None)
        biases = [
            (token, bias)
            for token, bias in zip(params.bias_token_ids, params.biases, strict=True)
            if token < self._vocab_size
        ]
        words = [word for word in params.bad_words if len(word) > 1 and word[-1] < self._vocab_size]
        if not biases and not words:
            return
        edits = self._table()
        tokens, values = zip(*biases, strict=True) if biases else ((), ())
        lengths = [len(word) for word in words]
        for table, content in (
            (edits.bias_tokens, np.array(tokens, dtype=np.int32)),
            (edits.biases, np.array(values, dtype=np.float32)),
            (edits.words, np.array([token for word in words for token in word], dtype=np.int32)),
            (edits.word_ends, np.cumsum(lengths, dtype=np.int32)),
        ):
            assert len(content) <= table.shape[1], "more edits than the limits of a request"
            if len(content):
                table[slot, : len(content)] = to_device(torch.from_numpy(content), self._device)
        self._slots[slot] = _Edits(params.num_prompt, len(biases), len(words))

    def gather(self, sampled: Sequence[SampledRow]) -> EditRows | None:
        """The rows of `sampled` that have edits; None if there are none."""
        found = [
            (
                row.sample,
                row.slot,
                row.slot * self._token_stride + row.end,
                row.end - edits.num_prompt,
                edits.num_biases,
                edits.num_words,
            )
            for row in sampled
            if (edits := self._slots.get(row.slot)) is not None
        ]
        if not found:
            return None
        rows, slots, cells, num_output, num_biases, num_words = _columns(found, self._device)
        return EditRows(
            rows=rows,
            slots=slots,
            cells=cells,
            num_output=num_output,
            num_biases=num_biases,
            num_words=num_words,
            most_biases=max(row[4] for row in found),
            most_words=max(row[5] for row in found),
        )

    def apply(self, logits: torch.Tensor, rows: EditRows, token_pool: torch.Tensor) -> None:
        """Edits logits [S, vocab] in place."""
        assert self._edits is not None, "edited rows come from an admission"
        apply_token_edits_(logits, self._edits, rows, token_pool)

    def _table(self) -> TokenEdits:
        if self._edits is None:
            shape, kind = (self._num_rows, MAX_LOGIT_BIASES), torch.int32
            words = (self._num_rows, MAX_BAD_WORDS_TOKENS)
            ends = (self._num_rows, _MAX_LONG_WORDS)
            self._edits = TokenEdits(
                bias_tokens=torch.zeros(shape, dtype=kind, device=self._device),
                biases=torch.zeros(shape, device=self._device),
                words=torch.zeros(words, dtype=kind, device=self._device),
                word_ends=torch.zeros(ends, dtype=kind, device=self._device),
            )
        return self._edits


class PenaltyTable:
    """Tokens in each slot's prompt, and counts of tokens in each slot's output, for penalties.

    Sampled tokens are counted on the device, since the next step may be launched before the token
    is on the host. When a request is admitted to a slot, the slot's counts are reset to those of
    its tokens.

    Args:
        num_rows: number of slots, including the dummy slot.
        vocab_size: number of tokens that can be sampled.
        device: device of the tables.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_rows = num_rows
        # Allocated for the first request that needs them: on most servers, none does.
        self._in_prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    def admit(self, slot: int, token_ids: npt.NDArray[np.int32], num_prompt: int) -> None:
        """Counts the tokens of a request that enters `slot`."""
        in_prompt, counts = self._tables()
        tokens = to_device(torch.from_numpy(token_ids.astype(np.int64)), self._device)
        output = tokens[num_prompt:]
        in_prompt[slot].zero_().index_fill_(0, tokens[:num_prompt], True)
        counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, rows: PenaltyRows, token_pool: torch.Tensor) -> None:
        """Penalizes logits [S, vocab] in place, at the tokens of the requests."""
        in_prompt, counts = self._tables()
        apply_penalties_(logits, rows, in_prompt, counts, token_pool)

    def count(self, tokens: torch.Tensor, rows: PenaltyRows, accepted: torch.Tensor | None) -> None:
        """Counts a step's sampled tokens.

        Args:
            tokens: [S] int64: sampled tokens.
            rows: rows that were penalized.
            accepted: [S] bool: samples that do not follow a rejected draft; None if all are
                accepted.
        """
        _, counts = self._tables()
        if accepted is not None:
            # Rejected samples are counted for the dummy slot, whose counts are never read.
            kept = accepted.index_select(0, rows.rows)
            rows = replace(rows, slots=rows.slots.where(kept, len(counts) - 1))
        count_tokens_(counts, rows, tokens)

    def count_block(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Counts tokens of the output of a slot's request."""
        _, counts = self._tables()
        tokens = to_device(torch.from_numpy(token_ids.astype(np.int64)), self._device)
        counts[slot].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._in_prompt is None or self._counts is None:
            shape = (self._num_rows, self._vocab_size)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._counts


def _columns(rows: Sequence[tuple[float, ...]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Columns [n] of a table with n rows, on the device: int64, or fp32 if it has floats."""
    return to_device(torch.tensor(rows).T.contiguous(), device).unbind()


def _pack(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    padded = np.pad(flags, (0, -len(flags) % _WORD))
    return np.packbits(padded, bitorder="little").view("<i4")


def table_bytes(num_rows: int, vocab_size: int) -> int:
    """Size of all tables for `num_rows` slots, in bytes; they are allocated when requests first
    need them."""
    masks = 2 * num_rows * -(-vocab_size // _WORD) * 4
    penalties = num_rows * vocab_size * (1 + 4)
    return masks + TokenEditTable.num_bytes(num_rows) + penalties


def penalizes(params: LogitsParams) -> bool:
    """Whether a request has any penalty that changes logits."""
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def gather_penalty_rows(sampled: Sequence[SampledRow], device: torch.device) -> PenaltyRows | None:
    """The rows of `sampled` that have penalties; None if there are none."""
    found = [row for row in sampled if penalizes(row.params)]
    if not found:
        return None
    layout = [(row.sample, row.slot, row.end, row.num_drafts) for row in found]
    rows, slots, ends, num_drafts = _columns(layout, device)
    params = [row.params for row in found]
    strengths = [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params]
    frequency, presence, repetition = _columns(strengths, device)
    return PenaltyRows(
        rows=rows,
        slots=slots,
        ends=ends,
        num_drafts=num_drafts,
        most_drafts=max(row.num_drafts for row in found),
        frequency=frequency,
        presence=presence,
        repetition=repetition,
    )
