"""Torch short convolution."""

from __future__ import annotations

import torch

from kernels import rowwise
from kernels.registry import op
from kernels.states import StateRows, advance_rows


@op
def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = False,
) -> torch.Tensor:
    """Convolves the tokens of all rows in fp32; updates and stores the rows' states. A token's
    result is bitwise independent of other rows and of how a prompt is split.

    The reference computes rows with one token together, and longer ones one after another.

    Args:
        x: [T, C], rows may be strided.
        weight: [N, C]: factors by input, the newest last.
        bias: [C]; None if unused.
        states: [states, N - 1, C]: last inputs of requests.
        rows: slots, chunks and snapshots of the rows.
        has_silu: whether SiLU is applied to the result.

    Returns:
        [T, C] in the dtype of x.
    """

    def advance(tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat((state, tokens), dim=-2)
        return convolve(window, weight, bias), window[..., -state.shape[-2] :, :]

    def steps(own: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = advance(x[own].unsqueeze(1), state)
        return out.squeeze(1), state

    out = advance_rows(states, rows, steps, lambda own, state: advance(x[own], state), x.shape)
    return (rowwise.silu(out) if has_silu else out).to(x.dtype)


def convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal convolution of each channel over its last N inputs. Terms are added in the order of
    positions for all shapes.

    Args:
        inputs: [..., N - 1 + T, C]: N - 1 earlier inputs, then those of the T positions.
        weight: [N, C]: the factor of the newest input is last.
        bias: [C]; None if unused.

    Returns:
        [..., T, C] fp32.
    """
    num_taps = len(weight)
    count = inputs.shape[-2] - num_taps + 1
    inputs, weight = inputs.float(), weight.float()
    total = inputs.narrow(-2, 0, count) * weight[0]
    for tap in range(1, num_taps):
        total = total + inputs.narrow(-2, tap, count) * weight[tap]
    return total if bias is None else total + bias.float()
