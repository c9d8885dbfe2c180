"""Masks of the tokens that requests allow, by slot on the device, for one launch per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import apply_token_bitmask
from worker.plan.plan import TokenRules
from worker.rank.sampling.penalties import Asking
from worker.rank.transfer import to_device

_WORD = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMaskRows:
    """The rows of a step's logits that are masked, int64 [n] each."""

    rows: torch.Tensor
    mask_rows: torch.Tensor
    """Of the table."""


class TokenMaskTable:
    """Two masks per slot: while stop tokens come too early, and from then on.

    They hold allowed tokens, single bad words and early stop tokens.

    Args:
        num_rows: slots, the padding's included.
        vocab_size: tokens that a draw can yield.
        device: where the masks lie.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._shape = (2 * num_rows, -(-vocab_size // _WORD))
        self._device = device
        # Most servers never see a mask, so the table is made for the first one.
        self._masks: torch.Tensor | None = None
        self._min_tokens: dict[int, int] = {}
        """By masked slot."""

    def admit(self, slot: int, rules: TokenRules) -> None:
        """Replaces the slot's masks."""
        self._min_tokens.pop(slot, None)
        bad = [word[0] for word in rules.bad_words if len(word) == 1]
        early = rules.stop_token_ids if rules.min_tokens else ()
        if not (rules.allowed_token_ids or bad or early):
            return
        if self._masks is None:
            self._masks = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        allowed = self._flags(rules.allowed_token_ids)
        if not allowed.any():
            allowed[:] = True
        late = allowed & ~self._flags(bad)
        masks = np.stack([_pack(late & ~self._flags(early)), _pack(late)])
        self._masks[2 * slot : 2 * slot + 2] = to_device(torch.from_numpy(masks), self._device)
        self._min_tokens[slot] = rules.min_tokens

    def gather(self, asking: Sequence[Asking]) -> TokenMaskRows | None:
        """From all rows with rules; None where none is masked."""
        found = []
        for one in asking:
            if (least := self._min_tokens.get(one.slot)) is not None:
                is_late = one.end - one.rules.num_prompt >= least
                found.append((one.sample, 2 * one.slot + is_late))
        if not found:
            return None
        rows, mask_rows = to_device(torch.tensor(found).T.contiguous(), self._device).unbind()
        return TokenMaskRows(rows=rows, mask_rows=mask_rows)

    def apply(self, logits: torch.Tensor, rows: TokenMaskRows) -> None:
        """Masks logits [R, vocab] in place."""
        assert self._masks is not None, "masked rows come from an admission"
        apply_token_bitmask(logits, self._masks, rows=rows.rows, mask_rows=rows.mask_rows)

    def _flags(self, token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Token ids beyond the vocabulary are left out: no draw could yield them."""
        flags = np.zeros(self._vocab_size, dtype=np.bool_)
        flags[[token_id for token_id in token_ids if token_id < self._vocab_size]] = True
        return flags


def _pack(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    padded = np.pad(flags, (0, -len(flags) % _WORD))
    return np.packbits(padded, bitorder="little").view("<i4")
