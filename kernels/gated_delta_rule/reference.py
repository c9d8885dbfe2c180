"""The rule, and the short convolution before it, as plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

_CHUNK = 64
"""Positions of a chunk: within one, all is products of matrices of so many rows."""


class DeltaInputs(NamedTuple):
    """Inputs of positions, all fp32: T of one row, or one each of T rows."""

    q: torch.Tensor
    """[T, H, K], scaled."""
    k: torch.Tensor
    """[T, H, K], of length 1."""
    v: torch.Tensor
    """[T, H, V]."""
    decay: torch.Tensor
    """[T, H]: logarithms, at most 0."""
    share: torch.Tensor
    """[T, H]: how much of what the state lacks of a value it takes up."""

    def part(self, start: int, end: int) -> DeltaInputs:
        """The inputs of some positions."""
        return DeltaInputs(*(tensor[start:end] for tensor in self))


def causal_convolution(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of each channel's sum over its last N inputs.

    The terms are added up in their order, whatever the shape.

    Args:
        inputs: [..., N - 1 + T, C]: those before the first position, then those of T.
        weight: [C, N], the newest input's factor last.

    Returns:
        [..., T, C] fp32.
    """
    num_taps = weight.shape[1]
    count = inputs.shape[-2] - num_taps + 1
    inputs, weight = inputs.float(), weight.float()
    total = inputs.narrow(-2, 0, count) * weight[:, 0]
    for tap in range(1, num_taps):
        total = total + inputs.narrow(-2, tap, count) * weight[:, tap]
    return torch.nn.functional.silu(total)


def gated_delta_steps(
    inputs: DeltaInputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One position of each of T rows.

    Args:
        inputs: of the rows.
        state: [T, H, K, V] fp32 before it.

    Returns:
        outputs [T, H, V] fp32 and the states [T, H, K, V] after it.
    """
    q, k, v, decay, share = inputs
    state = state * decay.exp()[..., None, None]
    missing = (v - (state * k.unsqueeze(-1)).sum(-2)) * share.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * missing.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def gated_delta_chunks(
    inputs: DeltaInputs, state: torch.Tensor, *, by_position: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """T positions of one row.

    Args:
        inputs: of the positions.
        state: [H, K, V] fp32 before the first.
        by_position: whether to go one by one, so that how positions are shared out to steps changes
            no bit.

    Returns:
        outputs [T, H, V] fp32 and the state [H, K, V] after the last.
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
    """One chunk of positions. What each takes up depends on those before it: a triangular system of
    equations (arXiv 2412.06464, section 3.3)."""
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])  # [H, T, ...]
    share = inputs.share.T.unsqueeze(-1)
    total = inputs.decay.T.cumsum(-1)
    # Of what is behind it alone: the others' exponents are positive, and may be beyond all bounds.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    system = (k * share) @ k.transpose(-1, -2) * between
    fade = total.exp().unsqueeze(-1)
    seen = (v - (k * fade) @ state) * share
    taken = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)
    output = (q * fade) @ state + (q @ k.transpose(-1, -2) * between) @ taken
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * fade[:, -1:] + (k * left).transpose(-1, -2) @ taken
    return output.transpose(0, 1), state
