"""The grammar masks of one step, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import apply_token_bitmask
from worker.engine.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskRows:
    """Which rows of the logits are masked, and how."""

    rows: torch.Tensor
    """int64 [M], ascending."""
    rows_host: Sequence[int]
    bitmask: torch.Tensor
    """int32 [M, ceil(vocab / 32)]; bit 1 allows."""

    @staticmethod
    def of(rows: Sequence[int], masks: bytes, vocab_size: int, device: torch.device) -> MaskRows:
        """From the bytes of a Sample message."""
        # A copy, since frombuffer's arrays are read-only, which tensors cannot be.
        words = np.frombuffer(masks, dtype="<i4").astype(np.int32)
        bitmask = torch.from_numpy(words.reshape(len(rows), -(-vocab_size // 32)))
        return MaskRows(
            rows=to_device(torch.tensor(rows), device),
            rows_host=rows,
            bitmask=to_device(bitmask, device),
        )

    def rows_among(self, samples: Sequence[int]) -> torch.Tensor:
        """The masked rows of a batch in which `samples` are the rows that draw."""
        return to_device(torch.tensor([samples[row] for row in self.rows_host]), self.rows.device)

    def apply(self, logits: torch.Tensor) -> None:
        """Leaves only allowed tokens in the masked rows of fp32 logits [S, vocab], in place."""
        every_row = len(self.rows) == len(logits)
        apply_token_bitmask(logits, self.bitmask, None if every_row else self.rows)
