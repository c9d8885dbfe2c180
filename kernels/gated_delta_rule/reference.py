"""Torch implementation of the gated delta rule, and of the short convolution before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import rowwise

_CHUNK = 64
"""Number of positions per chunk, which are computed together by matrix products."""


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


def causal_convolution(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal convolution of each channel over its last N inputs, then SiLU.

    Terms are added in the order of positions for all shapes.

    Args:
        inputs: [..., N - 1 + T, C]: N - 1 earlier inputs, then those of the T positions.
        weight: [C, N]: the newest input's factor is last.

    Returns:
        [..., T, C] fp32.
    """
    num_taps = weight.shape[1]
    count = inputs.shape[-2] - num_taps + 1
    inputs, weight = inputs.float(), weight.float()
    total = inputs.narrow(-2, 0, count) * weight[:, 0]
    for tap in range(1, num_taps):
        total = total + inputs.narrow(-2, tap, count) * weight[:, tap]
    return rowwise.silu(total)


def gated_delta_steps(
    inputs: DeltaInputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances T rows by one position each.

    Args:
        inputs: inputs of the rows.
        state: fp32 [T, H, K, V]: states before the position.

    Returns:
        Outputs, fp32 [T, H, V], and states after the position, [T, H, K, V].
    """
    q, k, v, decay, share = inputs
    state = state * decay.exp()[..., None, None]
    missing = (v - (state * k.unsqueeze(-1)).sum(-2)) * share.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * missing.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def gated_delta_chunks(
    inputs: DeltaInputs, state: torch.Tensor, *, by_position: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances one row by T positions.

    Args:
        inputs: inputs of the positions.
        state: fp32 [H, K, V]: state before the first position.
        by_position: whether to advance by single positions, so that the result does not depend, in
            any bit, on how a prompt is split into chunks.

    Returns:
        Outputs, fp32 [T, H, V], and the state after the last position, [H, K, V].
    """
    length = 1 if by_position else _CHUNK
    outputs: list[torch.Tensor] = []
    for start in range(0, len(inputs.q), length):
        part = inputs.part(start, start + length)
        if by_position:
            output, state = (x.squeeze(0) for x in gated_delta_steps(part, state.unsqueeze(0)))
            outputs.append(output.unsqueeze(0))
        else:
            output, state = _chunk(part, state)
            outputs.append(output)
    return torch.cat(outputs), state


def _chunk(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances a row by one chunk. The updates of the state depend on those of earlier positions,
    so they are solved as a triangular system (arXiv 2412.06464, section 3.3)."""
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])  # [H, T, ...]
    share = inputs.share.T.unsqueeze(-1)
    total = inputs.decay.T.cumsum(-1)
    # The upper triangle is masked before exp, too: its exponents are positive and may overflow.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    system = (k * share) @ k.transpose(-1, -2) * between
    fade = total.exp().unsqueeze(-1)
    seen = (v - (k * fade) @ state) * share
    taken = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)
    output = (q * fade) @ state + (q @ k.transpose(-1, -2) * between) @ taken
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * fade[:, -1:] + (k * left).transpose(-1, -2) @ taken
    return output.transpose(0, 1), state
