"""Torch implementation of the gated delta rule, and of the rest of its layer."""

from __future__ import annotations

from typing import Final

import torch

from kernels import rowwise
from kernels.gated_delta_rule.base import LENGTH_EPS, DeltaInputs, DeltaLayer
from kernels.registry import op
from kernels.rms_norm import rms_norm
from kernels.short_convolution import convolve
from kernels.states import PIECE, StateCache, StateRows

_CHANNEL_PIECE: Final = 16
"""Maximum number of positions in a chunk if each dimension of keys has its own decay: time and
memory grow with the number of pairs of positions times dimensions."""


@op
def gated_delta_net(
    projected: torch.Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Applies the short convolution to queries, keys and values, then the delta rule and the gated
    norm of its outputs; updates and stores the states of all rows.

    Args:
        projected: [T, W]: projections of the rows' tokens, with `DeltaLayer.widths`.
        layer: weights.
        cache: states; only padding rows, whose results are arbitrary, may share one.
        rows: slots, chunks and snapshots of the rows.
        by_position: whether to advance by single positions, so that the result is bitwise
            independent of other rows and of how a prompt is split into chunks.

    Returns:
        [T, H * V] in the dtype of `projected`.
    """
    widths = layer.widths
    mixed, z, b, a = projected.split([sum(widths[:3]), *widths[3:]], dim=1)
    decay = -layer.log_rate.exp() * rowwise.softplus(a.float() + layer.step_bias)
    share = rowwise.sigmoid(b.float()) * layer.share_scale
    out = _mix(mixed, decay, share, layer, cache, rows, by_position=by_position)
    out = rms_norm(out.to(projected.dtype), layer.norm, layer.eps)
    gate = rowwise.silu(z.float()).view(out.shape)
    return (out * gate).to(projected.dtype).flatten(1)


def _mix(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    share: torch.Tensor,
    layer: DeltaLayer,
    cache: StateCache,
    rows: StateRows,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Convolution and delta rule of all rows, which updates and stores their states. Rows with one
    token are computed together, longer ones one after another.

    Args:
        mixed: [T, C]: projections before the convolution.
        decay: [T, H] fp32: logarithms of the decay.
        share: [T, H] fp32: step sizes of the delta rule (beta).
        layer: weights.
        cache: states.
        rows: rows of the step.
        by_position: as in `gated_delta_chunks`.

    Returns:
        [T, H, V] fp32.
    """
    border = rows.num_decodes
    outputs = decay.new_zeros(len(mixed), decay.shape[1], len(layer.norm))
    if border:
        slots, is_first = rows.slots[:border], rows.starts[:border] == 0
        before = cache.conv.index_select(0, slots)
        before = before.masked_fill(is_first[:, None, None], 0)
        window = torch.cat((before, mixed[:border].unsqueeze(1)), dim=1)
        state = cache.recurrent.index_select(0, slots)
        state = state.masked_fill(is_first[:, None, None, None], 0)
        convolved = causal_convolution(window, layer.conv.T).squeeze(1)
        inputs = delta_inputs(convolved, decay[:border], share[:border], layer)
        outputs[:border], state = gated_delta_steps(inputs, state)
        rows.keep_steps(cache.conv, window[:, 1:])
        rows.keep_steps(cache.recurrent, state)
    for slot, parts in rows.longer():
        for part in parts:
            own = slice(part.start, part.end)
            before, state = cache.conv[slot], cache.recurrent[slot]
            if part.is_first:
                before, state = torch.zeros_like(before), torch.zeros_like(state)
            window = torch.cat((before, mixed[own]))
            convolved = causal_convolution(window, layer.conv.T)
            inputs = delta_inputs(convolved, decay[own], share[own], layer)
            outputs[own], state = gated_delta_chunks(inputs, state, by_position=by_position)
            if part.is_kept:
                cache.conv[slot] = window[part.end - part.start :]
                cache.recurrent[slot] = state
            if part.target >= 0:
                cache.copy(slot, part.target)
    stored = rows.stored()
    if stored is not None:
        cache.copy(*stored)
    return outputs


def delta_inputs(
    convolved: torch.Tensor, decay: torch.Tensor, share: torch.Tensor, layer: DeltaLayer
) -> DeltaInputs:
    """Inputs of the delta rule by value head; consecutive value heads share a key head."""
    keys, _, values = layer.widths[:3]
    q, k, v = convolved.split([keys, keys, values], dim=1)
    ratio = decay.shape[1] // layer.num_key_heads
    q, k = (
        unit_length(x.view(len(x), layer.num_key_heads, layer.key_dim)).repeat_interleave(
            ratio, dim=1
        )
        for x in (q, k)
    )
    v = v.view(len(v), decay.shape[1], -1)
    return DeltaInputs(q * layer.key_dim**-0.5, k, v, decay, share)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """L2-normalizes x [..., D], fp32, over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


def causal_convolution(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal convolution of each channel over its last N inputs, then SiLU.

    Args:
        inputs: [..., N - 1 + T, C]: N - 1 earlier inputs, then those of the T positions.
        weight: [C, N]: the factor of the newest input is last.

    Returns:
        [..., T, C] fp32.
    """
    return rowwise.silu(convolve(inputs, weight.T))


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
    fade = decay.exp()
    state = state * (fade[..., None, None] if fade.dim() == 2 else fade.unsqueeze(-1))
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
        by_position: whether to advance by single positions, so that the result is bitwise
            independent of how a prompt is split into chunks.

    Returns:
        Outputs, fp32 [T, H, V], and the state after the last position, [H, K, V].
    """
    has_channels = inputs.decay.dim() == 3
    length = 1 if by_position else _CHANNEL_PIECE if has_channels else PIECE
    advance = _chunk_by_channel if has_channels else _chunk
    outputs: list[torch.Tensor] = []
    for start in range(0, len(inputs.q), length):
        part = inputs.part(start, start + length)
        if by_position:
            output, state = (x.squeeze(0) for x in gated_delta_steps(part, state.unsqueeze(0)))
            outputs.append(output.unsqueeze(0))
        else:
            output, state = advance(part, state)
            outputs.append(output)
    return torch.cat(outputs), state


def _chunk(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances a row by one chunk of up to `PIECE` positions. The updates of the state depend on
    those of earlier positions, so they are computed by solving a triangular system (arXiv
    2412.06464, section 3.3)."""
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])  # [H, T, ...]
    share = inputs.share.T.unsqueeze(-1)
    total = inputs.decay.T.cumsum(-1)
    # The upper triangle is also masked before exp: its exponents are positive and may overflow.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    system = (k * share) @ k.transpose(-1, -2) * between
    fade = total.exp().unsqueeze(-1)
    seen = (v - (k * fade) @ state) * share
    taken = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)
    output = (q * fade) @ state + (q @ k.transpose(-1, -2) * between) @ taken
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * fade[:, -1:] + (k * left).transpose(-1, -2) @ taken
    return output.transpose(0, 1), state


def _chunk_by_channel(
    inputs: DeltaInputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_chunk` with a decay per dimension of keys. Decays are applied before the matmuls, since
    they cannot be factored out of the results (arXiv 2510.26692, section 3)."""
    q, k, v, decay = (x.transpose(0, 1) for x in inputs[:4])  # [H, T, ...]
    share = inputs.share.T.unsqueeze(-1)
    total = decay.cumsum(1)
    later = share.new_ones(len(inputs.q), len(inputs.q)).triu(1).bool().unsqueeze(-1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(later, -torch.inf).exp()
    faded = between * k.unsqueeze(1)  # [H, T, earlier T, K]
    scores, overlap = ((faded @ x.unsqueeze(-1)).squeeze(-1) for x in (q, k))
    fade = total.exp()
    seen = (v - (k * fade) @ state) * share
    taken = torch.linalg.solve_triangular(overlap * share, seen, upper=False, unitriangular=True)
    output = (q * fade) @ state + scores @ taken
    left = (total[:, -1:] - total).exp()
    state = state * fade[:, -1].unsqueeze(-1) + (k * left).transpose(-1, -2) @ taken
    return output.transpose(0, 1), state
