"""Fixed-size states that layers keep per request (recurrent states, last inputs of convolutions),
rows of a step, and the loop with which torch implementations advance states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

PIECE: Final = 64
"""Maximum number of positions in a chunk, which are computed together by matmuls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """States of requests in one layer: those of all slots, then snapshots."""

    planes: tuple[torch.Tensor, ...]
    """Tensors [states, ...] that together form the states."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Tensors [cells, ...]: inputs of the latest draft rows (see `Replay`); empty if there are no
    drafts."""

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
    """Index in the state caches to which the state after the last token is copied; -1 if it is not
    copied."""
    is_first: bool
    """Whether the request begins here: its state then starts from zero, regardless of the slot's
    content."""
    is_kept: bool
    """Whether the state after the last token becomes the slot's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """R rows of a step, divided into N chunks (`piece_...`): consecutive tokens of one row, at most
    `PIECE`. A chunk ends at the end of its row, or at a position whose state is stored. Empty
    chunks may follow."""

    slots: torch.Tensor
    """int64 [R]: slots of the rows."""
    starts: torch.Tensor
    """int64 [R]: positions of the rows' first tokens. At position 0, a request begins and its state
    starts from zero, regardless of the slot's content."""
    piece_starts: torch.Tensor
    """int64 [N + 1]: indices of the chunks' first tokens among the step's tokens, which all belong
    to a chunk; then the number of tokens. In a replay, tokens that belong to no chunk may follow;
    their outputs are arbitrary."""
    piece_rows: torch.Tensor
    """int64 [N]: rows of the chunks."""
    piece_targets: torch.Tensor
    """int64 [N]: indices in the state caches to which the states after the chunks are copied; -1 if
    they are not copied."""
    row_pieces: torch.Tensor
    """int64 [R + 1]: indices of the rows' first chunks, followed by the number of chunks of all
    rows."""
    num_decodes: int
    """Number of leading rows that are computed as rows with one token."""
    longest: int
    """Maximum number of tokens of a row, or an upper bound."""
    kept: torch.Tensor | None = None
    """int64 [R]: slots of the rows; -1 for draft rows, which leave the states as they are. None if
    there are no draft rows."""
    has_outputs: bool = True
    """Whether the outputs are used; the outputs of a replay are not, and need not be computed."""
    replay: Replay | None = None
    """Replay of accepted drafts before the rows, and cells for the inputs of draft rows; None if
    the step has neither."""

    def longer(self) -> Sequence[tuple[int, Sequence[StatePart]]]:
        """Slots and parts of the rows that are not included in `num_decodes`, on the host; waits
        for the device."""
        border = self.num_decodes
        if border == len(self.slots):
            return ()
        slots, starts = self.slots.tolist(), self.starts.tolist()
        ends, targets = self.piece_starts.tolist()[1:], self.piece_targets.tolist()
        kept = slots if self.kept is None else self.kept.tolist()
        pieces = self.row_pieces.tolist()
        rows: list[tuple[int, list[StatePart]]] = []
        token = border
        for row in range(border, len(slots)):
            parts: list[StatePart] = []
            is_first, last = starts[row] == 0, pieces[row + 1] - 1
            for piece in range(pieces[row], pieces[row + 1]):
                if (piece == last or targets[piece] >= 0) and ends[piece] > token:
                    is_kept = kept[row] >= 0
                    parts.append(StatePart(token, ends[piece], targets[piece], is_first, is_kept))
                    token, is_first = ends[piece], False
            rows.append((slots[row], parts))
        return rows

    def keep_steps(self, plane: torch.Tensor, states: torch.Tensor) -> None:
        """Writes the states [n, ...] after the rows included in `num_decodes` to the slots of these
        rows."""
        slots = self.slots[: self.num_decodes]
        if self.kept is not None:
            (rows,) = (self.kept[: self.num_decodes] >= 0).nonzero(as_tuple=True)
            slots, states = slots[rows], states[rows]
        plane.index_copy_(0, slots, states)

    def stored(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Slots of the rows of one token whose states are stored, and the indices to which the
        states are copied, int64 [n] each; None if there are none. Waits for the device."""
        targets = self.piece_targets[: self.num_decodes]
        if max(targets.tolist(), default=-1) < 0:
            return None
        (rows,) = (targets >= 0).nonzero(as_tuple=True)
        return self.slots[rows], targets[rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Replay of accepted drafts into the states of requests.

    A state cannot be rolled back to the last accepted draft. So a draft row (the newest token, and
    drafts) computes its outputs, but leaves the slot's state as it is, and its inputs are kept. The
    slot's next row again begins at the newest token. Before that row, the accepted tokens, which
    are those between the state and the row, are recomputed from their inputs.
    """

    rows: StateRows
    """The tokens that are replayed, grouped by the row that follows them; their outputs are not
    used."""
    cells: torch.Tensor
    """int64 [N]: cells of the replayed tokens in `StateCache.inputs`, in order. On a device, cells
    after the last token of `rows` are arbitrary."""
    tokens: torch.Tensor
    """int64 [M]: the step's tokens whose inputs are kept: those of draft rows."""
    kept: torch.Tensor
    """int64 [M]: cells of `StateCache.inputs` to which the inputs of `tokens` are copied."""


Inputs = Sequence[torch.Tensor]
"""Tensors [T, ...]: what a layer computes from tokens before it reads their states."""


def advance_with_drafts(
    inputs: Inputs,
    cache: StateCache,
    rows: StateRows,
    advance: Callable[[Inputs, StateRows], torch.Tensor],
) -> torch.Tensor:
    """Advances the states of a layer: by accepted drafts of earlier steps, then by the step's
    tokens.

    Args:
        inputs: inputs of the step's tokens, [T, ...] each, as in `StateCache.inputs`.
        cache: the layer's states.
        rows: rows of the step.
        advance: advances the states by the tokens of rows with these inputs; returns outputs.

    Returns:
        The outputs of the step's tokens.
    """
    replay = rows.replay
    if replay is None:
        return advance(inputs, rows)
    if len(replay.cells):
        advance([plane.index_select(0, replay.cells) for plane in cache.inputs], replay.rows)
    outputs = advance(inputs, rows)
    # Done after the replay, which may read the same cells.
    for plane, own in zip(cache.inputs, inputs, strict=True):
        plane.index_copy_(0, replay.kept, own.index_select(0, replay.tokens))
    return outputs


Advance = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Advances states by the tokens of a slice; returns the outputs and the new states."""


def advance_rows(
    plane: torch.Tensor, rows: StateRows, steps: Advance, chunk: Advance, shape: Sequence[int]
) -> torch.Tensor:
    """Advances the states of all rows in one plane, and stores snapshots of them.

    Args:
        plane: [states, ...]: states of the layer.
        rows: rows of the step.
        steps: advances rows with one token: tokens [t] and their states [t, ...] to outputs [t,
            ...].
        chunk: advances one row: its next tokens [t] and its state [...] to outputs [t, ...].
        shape: shape of the outputs of all tokens: (T, ...).

    Returns:
        The outputs, fp32; 0 for tokens that belong to no chunk.
    """
    border, outputs = rows.num_decodes, torch.zeros(shape, device=plane.device)
    if border:
        slots = rows.slots[:border]
        state = plane.index_select(0, slots)
        is_first = (rows.starts[:border] == 0).view(-1, *[1] * (state.dim() - 1))
        outputs[:border], state = steps(slice(0, border), state.masked_fill(is_first, 0))
        rows.keep_steps(plane, state)
    for slot, parts in rows.longer():
        for part in parts:
            state = torch.zeros_like(plane[slot]) if part.is_first else plane[slot]
            own = slice(part.start, part.end)
            outputs[own], state = chunk(own, state)
            if part.is_kept:
                plane[slot] = state
            if part.target >= 0:
                plane[part.target] = state
    stored = rows.stored()
    if stored is not None:
        sources, targets = stored
        plane[targets] = plane[sources]
    return outputs
