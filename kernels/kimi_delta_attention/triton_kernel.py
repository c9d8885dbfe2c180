"""Triton Kimi Delta Attention: launches of a step.

Rows with few tokens are advanced position by position in one launch, longer ones by chunks, as in
`kernels/gated_delta_rule`. Each launch is for all rows, and each program determines on the device
whether it computes its row, so graphs can run steps with any rows.
"""

from __future__ import annotations

from typing import Final

import torch

from kernels.kimi_delta_attention import KimiDeltaLayer, KimiGates, kimi_delta_attention
from kernels.kimi_delta_attention.triton_outputs import gate_outputs
from kernels.kimi_delta_attention.triton_pieces import advance_by_pieces
from kernels.kimi_delta_attention.triton_steps import advance_by_position
from kernels.registry import implements
from kernels.states import StateRows

MOST_STEPS: Final = 16
"""Maximum number of tokens of a row that is advanced by position; estimated as for the gated delta
net."""
_ALL: Final = 1 << 30


@implements(kimi_delta_attention, "triton")
def launch_kimi_delta_attention(
    x: torch.Tensor,
    gates: KimiGates,
    layer: KimiDeltaLayer,
    states: torch.Tensor,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Launches the kernels for rows of few tokens (all rows if `by_position`), the other rows, and
    the norm."""
    out = torch.empty_like(gates.output, dtype=x.dtype, memory_format=torch.contiguous_format)
    if not len(x):
        return out
    most = _ALL if by_position else MOST_STEPS
    advance_by_position(x, gates, layer, states, rows, out, most_tokens=most)
    if rows.longest > most:
        advance_by_pieces(x, gates, layer, states, rows, out, least_tokens=most + 1)
    if rows.has_outputs:
        gate_outputs(gates.output, layer, rows, out)
    return out
