"""The grammar masks of one step, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from kernels import apply_token_bitmask
from kernels.native import apply_bitmask_native
from worker.rank.transfer import to_device


class MaskRows:
    """Which rows of the logits are masked, and how.

    Args:
        rows: of the logits, ascending.
        masks: as in a Sample message: one row of ceil(vocab / 32) little-endian words for each of
            `rows`; bit 1 allows.
        vocab_size: tokens that a draw can yield.
        device: where the logits are.
    """

    def __init__(
        self, rows: Sequence[int], masks: bytes, vocab_size: int, device: torch.device
    ) -> None:
        self._rows = rows
        self._masks = masks
        self._vocab_size = vocab_size
        self._shape = (len(rows), -(-vocab_size // 32))
        self._device = device

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 [M]."""
        return to_device(torch.tensor(self._rows), self._device)

    @cached_property
    def bitmask(self) -> torch.Tensor:
        """int32 [M, ceil(vocab / 32)]."""
        # A copy, since frombuffer's arrays are read-only, which tensors cannot be.
        words = np.frombuffer(self._masks, dtype="<i4").astype(np.int32)
        return to_device(torch.from_numpy(words.reshape(self._shape)), self._device)

    def rows_among(self, samples: Sequence[int]) -> torch.Tensor:
        """The masked rows of a batch in which `samples` are the rows that draw."""
        return to_device(torch.tensor([samples[row] for row in self._rows]), self._device)

    def apply(self, logits: torch.Tensor, *, native: bool = False) -> None:
        """Leaves only allowed tokens in the masked rows of fp32 logits [S, vocab], in place.

        With `native` the compiled CPU library does, straight from the message.
        """
        if native and logits.is_contiguous():
            apply_bitmask_native(logits, self._rows, self._masks)
            return
        every_row = len(self._rows) == len(logits)
        apply_token_bitmask(logits, self.bitmask, None if every_row else self.rows)
