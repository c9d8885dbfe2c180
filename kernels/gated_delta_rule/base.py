"""Types of the gated delta net: inputs of the rule, weights of a layer, states, rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

PIECE: Final = 64
"""Maximum number of positions that are computed together by matrix products."""
LENGTH_EPS: Final = 1e-6
"""Added to the square of the length of queries and keys, which are divided by it."""


class DeltaInputs(NamedTuple):
    """Inputs of T positions, fp32: consecutive ones of one row, or one each of T rows."""

    q: torch.Tensor
    """[T, H, K]: scaled queries."""
    k: torch.Tensor
    """[T, H, K]: keys of length 1."""
    v: torch.Tensor
    """[T, H, V]: values."""
    decay: torch.Tensor
    """[T, H]: logarithms of the decay, at most 0."""
    share: torch.Tensor
    """[T, H]: step sizes (beta): the part of v - S^T k that updates the state."""

    def part(self, start: int, end: int) -> DeltaInputs:
        """Inputs of positions from `start` up to, not including, `end`."""
        return DeltaInputs(*(tensor[start:end] for tensor in self))


class DeltaLayer(NamedTuple):
    """Weights and sizes of a layer with Hk key heads and H value heads."""

    conv: torch.Tensor
    """[N, C]: weights of the convolution by input, the newest last, and by channel: C = 2 Hk K +
    H V, for all queries, keys and values."""
    log_rate: torch.Tensor
    """[H] fp32 (A_log): logarithms of the rates of decay."""
    step_bias: torch.Tensor
    """[H] fp32 (dt_bias)."""
    norm: torch.Tensor
    """[V]: weight of the norm over each head of outputs."""
    eps: float
    """Added to the mean square by the norm."""
    num_key_heads: int
    """Hk, a divisor of H: consecutive value heads share a key head."""
    key_dim: int
    """K."""

    @property
    def widths(self) -> list[int]:
        """Widths of q, k, v, z, b and a in a projected token: z gates the outputs, b are the step
        sizes and a the decays before their activations."""
        num_heads = len(self.log_rate)
        keys, values = self.num_key_heads * self.key_dim, num_heads * len(self.norm)
        return [keys, keys, values, values, num_heads, num_heads]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """States of requests in one linear-attention layer: those of all slots, then snapshots."""

    conv: torch.Tensor
    """[states, N - 1, C]: last inputs of the convolution."""
    recurrent: torch.Tensor
    """[states, H, K, V] fp32: recurrent states."""

    def copy(self, source: torch.Tensor | int, target: torch.Tensor | int) -> None:
        """Copies states with indices `source` to `target`: one each, or int64 [N] each."""
        self.conv[target] = self.conv[source]
        self.recurrent[target] = self.recurrent[source]


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
    """R rows of a step, divided into N pieces: consecutive tokens of one row, at most `PIECE`, that
    end where the row or a part of it does whose state is stored. Pieces of no tokens may follow."""

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
