"""States of layers that keep one per request, of the same size for any length (recurrent states,
last inputs of convolutions), rows of a step, and the loop with which torch implementations
advance states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

PIECE: Final = 64
"""Maximum number of positions that are computed together by matrix products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """States of requests in one layer: those of all slots, then snapshots."""

    planes: tuple[torch.Tensor, ...]
    """Tensors [states, ...] that together are the states."""

    @property
    def conv(self) -> torch.Tensor:
        """[states, N - 1, C]: last inputs of a convolution, the first plane."""
        return self.planes[0]

    @property
    def recurrent(self) -> torch.Tensor:
        """[states, H, K, V] fp32: recurrent states, the last plane."""
        return self.planes[-1]

    def copy(self, source: torch.Tensor | int, target: torch.Tensor | int) -> None:
        """Copies states with indices `source` to `target`: one each, or int64 [N] each."""
        for plane in self.planes:
            plane[target] = plane[source]


class StatePart(NamedTuple):
    """Consecutive tokens of one row, up to a position whose state is stored, or to the row's
    end."""

    start: int
    """Index of the first token among the step's tokens."""
    end: int
    """Index after the last token."""
    target: int
    """Index in the state caches that the state after the last token is copied to; -1 for no
    copy."""
    is_first: bool
    """Whether the request begins here: its state then starts from zero, regardless of the slot's
    content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """R rows of a step, divided into N pieces: consecutive tokens of one row, at most `PIECE`. A
    piece ends at the end of its row, or at a position whose state is stored. Pieces of no tokens
    may follow."""

    slots: torch.Tensor
    """int64 [R]: slots of the rows."""
    starts: torch.Tensor
    """int64 [R]: positions of the rows' first tokens. At 0 a request begins, and its state starts
    from zero, regardless of the slot's content."""
    piece_starts: torch.Tensor
    """int64 [N + 1]: indices of the pieces' first tokens among the step's tokens, which all belong
    to a piece; then the number of tokens."""
    piece_rows: torch.Tensor
    """int64 [N]: rows of the pieces."""
    piece_targets: torch.Tensor
    """int64 [N]: indices in the state caches that the states after the pieces are copied to; -1 for
    no copy."""
    row_pieces: torch.Tensor
    """int64 [R + 1]: number of the rows' first pieces; then of the pieces of all rows."""
    num_decodes: int
    """Number of leading rows that are computed as rows of one token."""
    longest: int
    """Maximum tokens of a row, or an upper bound."""

    def longer(self) -> Sequence[tuple[int, Sequence[StatePart]]]:
        """Slots and parts of the rows that `num_decodes` does not count, on the host; waits for the
        device."""
        border = self.num_decodes
        if border == len(self.slots):
            return ()
        slots, starts = self.slots.tolist(), self.starts.tolist()
        ends, targets = self.piece_starts.tolist()[1:], self.piece_targets.tolist()
        pieces = self.row_pieces.tolist()
        rows: list[tuple[int, list[StatePart]]] = []
        token = border
        for row in range(border, len(slots)):
            parts: list[StatePart] = []
            is_first, last = starts[row] == 0, pieces[row + 1] - 1
            for piece in range(pieces[row], pieces[row + 1]):
                if piece == last or targets[piece] >= 0:
                    parts.append(StatePart(token, ends[piece], targets[piece], is_first))
                    token, is_first = ends[piece], False
            rows.append((slots[row], parts))
        return rows

    def stored(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Slots of rows of one token and the indices that their states are copied to, int64 [n]
        each; None without any. Waits for the device."""
        targets = self.piece_targets[: self.num_decodes]
        if max(targets.tolist(), default=-1) < 0:
            return None
        (rows,) = (targets >= 0).nonzero(as_tuple=True)
        return self.slots[rows], targets[rows]


Advance = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Advances states by the tokens of a slice: returns outputs, and the states afterwards."""


def advance_rows(
    plane: torch.Tensor, rows: StateRows, steps: Advance, chunk: Advance
) -> torch.Tensor:
    """Advances the states of all rows in one plane, and stores snapshots of them.

    Args:
        plane: [states, ...].
        rows: rows of the step.
        steps: advances rows of one token: tokens [t] and their states [t, ...] to outputs [t, ...].
        chunk: advances one row: its next tokens [t] and its state [...] to outputs [t, ...].

    Returns:
        The outputs of all tokens [T, ...].
    """
    border, outputs = rows.num_decodes, list[torch.Tensor]()
    if border:
        slots = rows.slots[:border]
        state = plane.index_select(0, slots)
        is_first = (rows.starts[:border] == 0).view(-1, *[1] * (state.dim() - 1))
        output, state = steps(slice(0, border), state.masked_fill(is_first, 0))
        plane.index_copy_(0, slots, state)
        outputs.append(output)
    for slot, parts in rows.longer():
        for part in parts:
            state = torch.zeros_like(plane[slot]) if part.is_first else plane[slot]
            output, state = chunk(slice(part.start, part.end), state)
            plane[slot] = state
            outputs.append(output)
            if part.target >= 0:
                plane[part.target] = state
    stored = rows.stored()
    if stored is not None:
        sources, targets = stored
        plane[targets] = plane[sources]
    return torch.cat(outputs)
