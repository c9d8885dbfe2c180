"""Short causal convolution of each channel over its last N inputs, which are a state per request.

    y_t = bias + sum over n < N of weight_n x_(t - N + 1 + n), perhaps followed by SiLU

Layers of LFM2 and Mamba-2 contain it. On CUDA, a step takes two launches.
"""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.short_convolution import reference
from kernels.states import StateRows

_SHORT_CONVOLUTION = registry.register(
    "short_convolution",
    reference.short_convolution,
    triton="kernels.short_convolution.triton_kernel:short_convolution",
)


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    *,
    has_silu: bool = False,
) -> torch.Tensor:
    """Convolves the tokens of all rows, computed in fp32; updates and stores the rows' states. A
    token's result does not depend, in any bit, on other rows or on how a prompt is split.

    Args:
        x: [T, C], rows may be strided.
        weight: [N, C]: factors by input, the newest last.
        bias: [C]; None for none.
        states: [states, N - 1, C]: last inputs of requests.
        rows: slots, pieces and snapshots of the rows.
        has_silu: whether SiLU follows.

    Returns:
        [T, C] in the type of x.
    """
    run = _SHORT_CONVOLUTION.select(x)
    return run(x, weight, bias, states, rows, has_silu)


__all__ = ["short_convolution"]
