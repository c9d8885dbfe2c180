"""Triton gated delta net: launches of a step.

Rows of few tokens are advanced position by position in one launch, which reads and writes a state
once. Longer rows are computed in chunks, all rows at once: first the terms that do not depend on
the state, then the states. Each launch is for all rows, and each program determines on the device
whether it computes its row, so graphs can contain steps with any rows.
"""

from __future__ import annotations

from typing import Final

import torch

from kernels.gated_delta_rule import DeltaLayer, gated_delta_net
from kernels.gated_delta_rule.triton_inputs import prepare_inputs
from kernels.gated_delta_rule.triton_outputs import gate_outputs
from kernels.gated_delta_rule.triton_pieces import advance_by_pieces
from kernels.gated_delta_rule.triton_steps import advance_by_position
from kernels.registry import implements
from kernels.states import StateCache, StateRows

MOST_STEPS: Final = 16
"""Maximum number of tokens of a row that is advanced by position. Estimated: a position takes about
1 us, and the launches for chunks take 20 us."""
_ALL: Final = 1 << 30


@implements(gated_delta_net, "triton")
def launch_gated_delta_net(
    projected: torch.Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Launches the kernels for the inputs, the rows of few tokens (all rows if `by_position`), the
    other rows, and the norm."""
    num_heads, value_dim = len(layer.log_rate), len(layer.norm)
    out = projected.new_empty(len(projected), num_heads * value_dim)
    if not len(projected):
        return out
    inputs = prepare_inputs(projected, layer, cache, rows)
    most = _ALL if by_position else MOST_STEPS
    advance_by_position(projected, inputs, layer, cache, rows, out, most_tokens=most)
    if rows.longest > most:
        advance_by_pieces(projected, inputs, layer, cache, rows, out, least_tokens=most + 1)
    if rows.has_outputs:
        gate_outputs(projected, layer, rows, out)
    return out
