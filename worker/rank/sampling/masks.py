"""Grammar masks of one step, for the logits on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from kernels import apply_token_bitmask
from kernels.native import apply_bitmask_native
from worker.rank.transfer import to_device


class MaskRows:
    """Masked rows of a step's logits, with their bitmasks.

    Args:
        rows: M rows of the logits, ascending.
        masks: bitmasks as in a Sample message: ceil(vocab / 32) little-endian int32 words for each
            of `rows`; a set bit allows a token.
        vocab_size: number of tokens that can be sampled.
        device: device of the logits.
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
        """Masked rows, int64 [M] on the device."""
        return to_device(torch.tensor(self._rows), self._device)

    @cached_property
    def bitmask(self) -> torch.Tensor:
        """Bitmasks, int32 [M, ceil(vocab / 32)] on the device."""
        # Copied: arrays from frombuffer are read-only, which tensors do not support.
        words = np.frombuffer(self._masks, dtype="<i4").astype(np.int32)
        return to_device(torch.from_numpy(words.reshape(self._shape)), self._device)

    def rows_among(self, samples: Sequence[int]) -> torch.Tensor:
        """Masked rows, int64 [M], as indices among all rows of a batch in which only the rows
        `samples` are sampled."""
        return to_device(torch.tensor([samples[row] for row in self._rows]), self._device)

    def apply(self, logits: torch.Tensor, *, native: bool = False) -> None:
        """Sets logits of forbidden tokens to -inf in the masked rows of fp32 logits [S, vocab].

        With `native`, the compiled CPU library reads the masks directly from the message.
        """
        if native and logits.is_contiguous():
            apply_bitmask_native(logits, self._rows, self._masks)
            return
        every_row = len(self._rows) == len(logits)
        apply_token_bitmask(logits, self.bitmask, None if every_row else self.rows)
