"""Torch selective scan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import rowwise
from kernels.registry import op
from kernels.selective_scan.base import ScanLayer
from kernels.states import PIECE, StateRows, advance_rows


@op
def selective_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    layer: ScanLayer,
    states: torch.Tensor,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Scans the tokens of all rows in fp32; updates and stores the rows' states.

    The reference computes rows with one token together, and longer ones one after another.

    Args:
        x: [T, H * P + 2 * G * N], contiguous: inputs, B and C (`ScanLayer.widths`).
        steps: [T, H], rows may be strided: step sizes before bias and softplus.
        layer: weights.
        states: fp32 [states, H, N, P]: recurrent states of requests.
        rows: slots, chunks and snapshots of the rows.
        by_position: whether to advance by single positions, so that the result is bitwise
            independent of other rows and of how a prompt is split into chunks.

    Returns:
        [T, H * P] in the dtype of x.
    """
    inputs = scan_inputs(x, steps, layer)

    def chunks(own: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan_chunks(inputs.part(own), state, by_position=by_position)

    def steps_of(own: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan_steps(inputs.part(own), state)

    out = advance_rows(states, rows, steps_of, chunks, inputs.x.shape)
    own = x[:, : layer.widths[0]].float().view(out.shape)
    return (out + own * layer.skip.unsqueeze(1)).to(x.dtype).flatten(1)


class ScanInputs(NamedTuple):
    """Inputs of T positions by head, in fp32: consecutive positions of one row, or one position of
    each of T rows."""

    x: torch.Tensor
    """[T, H, P]: inputs times step sizes."""
    b: torch.Tensor
    """[T, H, N]: B of each head's group."""
    c: torch.Tensor
    """[T, H, N]: C of each head's group."""
    decay: torch.Tensor
    """[T, H]: logarithms of the decay, at most 0."""

    def part(self, own: slice) -> ScanInputs:
        """Inputs of a slice of the positions."""
        return ScanInputs(*(tensor[own] for tensor in self))


def scan_inputs(x: torch.Tensor, steps: torch.Tensor, layer: ScanLayer) -> ScanInputs:
    """Splits the inputs of `selective_scan` by head."""
    num_heads = len(layer.log_rate)
    values, *shared = x.float().split(layer.widths, dim=1)
    b, c = (
        part.view(len(x), layer.num_groups, layer.state_dim).repeat_interleave(
            num_heads // layer.num_groups, dim=1
        )
        for part in shared
    )
    sizes = rowwise.softplus(steps.float() + layer.step_bias)
    values = values.view(len(x), num_heads, layer.head_dim) * sizes.unsqueeze(-1)
    return ScanInputs(values, b, c, -layer.log_rate.exp() * sizes)


def scan_steps(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances T rows by one position each.

    Args:
        inputs: inputs of the rows.
        state: fp32 [T, H, N, P]: states before the position.

    Returns:
        Outputs without the skip term (D x), fp32 [T, H, P], and states after the position.
    """
    x, b, c, decay = inputs
    state = state * decay.exp()[..., None, None] + b.unsqueeze(-1) * x.unsqueeze(-2)
    return (state * c.unsqueeze(-1)).sum(-2), state


def scan_chunks(
    inputs: ScanInputs, state: torch.Tensor, *, by_position: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances one row by T positions.

    Args:
        inputs: inputs of the positions.
        state: fp32 [H, N, P]: state before the first position.
        by_position: whether to advance by single positions.

    Returns:
        Outputs without the skip term (D x), fp32 [T, H, P], and the state after the last position.
    """
    outputs: list[torch.Tensor] = []
    for start in range(0, len(inputs.x), 1 if by_position else PIECE):
        if by_position:
            output, after = scan_steps(inputs.part(slice(start, start + 1)), state.unsqueeze(0))
            state = after.squeeze(0)
        else:
            output, state = _chunk(inputs.part(slice(start, start + PIECE)), state)
        outputs.append(output)
    return torch.cat(outputs), state


def _chunk(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances one row by matmuls. A position's output is the state's contribution, plus the sum of
    the inputs of all positions up to its own, each multiplied by its decayed C B^T."""
    x, b, c = (part.transpose(0, 1) for part in inputs[:3])
    faded = inputs.decay.T.cumsum(1)
    between = (faded.unsqueeze(2) - faded.unsqueeze(1)).tril()
    scores = (c @ b.transpose(1, 2)) * between.exp().tril()
    out = scores @ x + (c @ state) * faded.exp().unsqueeze(2)
    rest = (faded[:, -1:] - faded).exp().unsqueeze(2)
    state = state * faded[:, -1].exp()[:, None, None] + (b * rest).transpose(1, 2) @ x
    return out.transpose(0, 1), state
