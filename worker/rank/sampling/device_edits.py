"""What `SlotEdits` does row by row, for all rows of a step in two launches (CUDA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import EditRows
from worker.plan.plan import TokenRules
from worker.rank.sampling.penalties import Asking
from worker.rank.sampling.token_edits import TokenEditTable
from worker.rank.sampling.token_masks import TokenMaskRows, TokenMaskTable


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEditRows:
    """The rows of a step's logits that are edited."""

    masks: TokenMaskRows | None
    edits: EditRows | None


class DeviceEdits:
    """Masks and edits of all slots, on the device from their admission on.

    Args:
        num_rows: slots, the padding's included.
        token_stride: cells of one slot in the flat token pool.
        vocab_size: tokens that a draw can yield.
        device: where the step runs.
    """

    def __init__(
        self, *, num_rows: int, token_stride: int, vocab_size: int, device: torch.device
    ) -> None:
        self._masks = TokenMaskTable(num_rows, vocab_size, device)
        self._edits = TokenEditTable(
            num_rows=num_rows, token_stride=token_stride, vocab_size=vocab_size, device=device
        )

    def admit(self, slot: int, rules: TokenRules) -> None:
        """Replaces the slot's masks and edits."""
        self._masks.admit(slot, rules)
        self._edits.admit(slot, rules)

    def gather(self, asking: Sequence[Asking]) -> DeviceEditRows | None:
        """From all rows with rules; None where none is edited."""
        masks, edits = self._masks.gather(asking), self._edits.gather(asking)
        if masks is None and edits is None:
            return None
        return DeviceEditRows(masks=masks, edits=edits)

    def apply(self, logits: torch.Tensor, rows: DeviceEditRows, token_pool: torch.Tensor) -> None:
        """Edits logits [R, vocab] in place."""
        if rows.masks is not None:
            self._masks.apply(logits, rows.masks)
        if rows.edits is not None:
            self._edits.apply(logits, rows.edits, token_pool)
