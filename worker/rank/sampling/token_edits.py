"""Biases and bad words of several tokens, by slot on the device, for one launch per step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels import EditRows, TokenEdits, apply_token_edits_
from kernels.token_edits import NONE
from worker.plan.plan import TokenRules
from worker.rank.sampling.penalties import Asking
from worker.rank.transfer import to_device

_LEAST_EDITS = 64
_LEAST_LENGTH = 4


class TokenEditTable:
    """What `SlotEdits` does row by row and `TokenMaskTable` cannot: edits that are numbers, or
    that depend on what was drawn.

    The table grows with the longest list of any request and never shrinks.

    Args:
        num_rows: slots, the padding's included.
        token_stride: cells of one slot in the flat token pool.
        vocab_size: tokens that a draw can yield.
        device: where the table lies.
    """

    def __init__(
        self, *, num_rows: int, token_stride: int, vocab_size: int, device: torch.device
    ) -> None:
        self._num_rows = num_rows
        self._token_stride = token_stride
        self._vocab_size = vocab_size
        self._device = device
        # Most servers never see an edit, so the table is made for the first one.
        self._edits: TokenEdits | None = None
        self._slots: dict[int, int] = {}
        """Tokens of the prompt, by slot with edits."""

    def admit(self, slot: int, rules: TokenRules) -> None:
        """Replaces the slot's edits."""
        self._slots.pop(slot, None)
        found = [
            (token, bias, ())
            for token, bias in zip(rules.bias_token_ids, rules.biases, strict=True)
        ] + [(word[-1], -np.inf, tuple(word[:-1])) for word in rules.bad_words if len(word) > 1]
        found = [edit for edit in found if edit[0] < self._vocab_size]
        if not found:
            return
        edits = self._with_room(len(found), max(len(before) for _, _, before in found))
        shape = edits.before.shape[1:]
        before = np.full(shape, NONE, dtype=np.int32)
        tokens, values = np.full(shape[0], NONE, dtype=np.int32), np.zeros(shape[0], np.float32)
        for place, (token, value, words) in enumerate(found):
            tokens[place], values[place] = token, value
            before[place, shape[1] - len(words) :] = words
        for table, own in ((edits.tokens, tokens), (edits.values, values), (edits.before, before)):
            table[slot] = to_device(torch.from_numpy(own), self._device)
        self._slots[slot] = rules.num_prompt

    def gather(self, asking: Sequence[Asking]) -> EditRows | None:
        """From all rows with rules; None where none is edited."""
        found = [
            (one.sample, one.slot, one.slot * self._token_stride + one.end, one.end - num_prompt)
            for one in asking
            if (num_prompt := self._slots.get(one.slot)) is not None
        ]
        if not found:
            return None
        columns = to_device(torch.tensor(found).T.contiguous(), self._device)
        rows, slots, cells, num_output = columns.unbind()
        return EditRows(rows=rows, slots=slots, cells=cells, num_output=num_output)

    def apply(self, logits: torch.Tensor, rows: EditRows, token_pool: torch.Tensor) -> None:
        """Edits logits [R, vocab] in place."""
        assert self._edits is not None, "edited rows come from an admission"
        apply_token_edits_(logits, self._edits, rows, token_pool)

    def _with_room(self, num_edits: int, length: int) -> TokenEdits:
        """The table, with room for so many edits of such a length in every slot."""
        old = self._edits
        room = (_LEAST_EDITS, _LEAST_LENGTH) if old is None else tuple(old.before.shape[1:])
        if old is not None and num_edits <= room[0] and length <= room[1]:
            return old
        size, width = (_doubled(*pair) for pair in zip(room, (num_edits, length), strict=True))
        shape = (self._num_rows, size)
        edits = TokenEdits(
            tokens=torch.full(shape, NONE, dtype=torch.int32, device=self._device),
            values=torch.zeros(shape, device=self._device),
            before=torch.full((*shape, width), NONE, dtype=torch.int32, device=self._device),
        )
        if old is not None:
            edits.tokens[:, : room[0]] = old.tokens
            edits.values[:, : room[0]] = old.values
            edits.before[:, : room[0], width - room[1] :] = old.before
        self._edits = edits
        return edits


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size
