"""Draws tokens: argmax for greedy rows, keyed Gumbel noise for the others.

HAZARD(invariance): a row's draw must not depend on the other rows. Everything here works token by
token, compares, or sums integers: floating-point sums may be split differently for another number
of rows and are therefore avoided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import SamplingParameters, gumbel_noise, registry, sample_tokens
from kernels.native import sample_native
from kernels.sample_tokens import GREEDY_BELOW
from kernels.sample_tokens import reference as torch_draws
from worker.rank.tables import IntArray, SamplingColumns
from worker.rank.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomRows:
    """Parameters of the rows that draw at random, [n] each; None where no row uses one.

    Kernels take all rows, the greedy ones too: those have a temperature under GREEDY_BELOW.
    """

    rows: torch.Tensor | None
    """Which rows of the logits, int64; None for all."""
    seeds: torch.Tensor
    positions: torch.Tensor
    """Where the new tokens will stand."""
    temperature: torch.Tensor
    top_k: torch.Tensor | None
    """int64, 0 keeps all."""
    max_top_k: int
    """Largest of them, known without asking the device."""
    top_p: torch.Tensor | None
    log_min_p: torch.Tensor | None
    """Logits further below the largest are dropped; -inf keeps all."""


def gather_random_rows(
    columns: SamplingColumns, slots: IntArray, positions: IntArray, device: torch.device
) -> RandomRows | None:
    """Collects the parameters of a step's sampling rows; None where all are greedy."""
    temperature = columns.temperature[slots]
    (rows,) = np.nonzero(temperature >= GREEDY_BELOW)
    if not len(rows):
        return None
    all_random = len(rows) == len(slots)
    slots, positions, temperature = slots[rows], positions[rows], temperature[rows]
    top_k, top_p = columns.top_k[slots], columns.top_p[slots]
    log_min_p = columns.log_min_p[slots]

    def column(values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)

    return RandomRows(
        rows=None if all_random else column(rows),
        seeds=column(columns.seed[slots]),
        positions=column(positions),
        temperature=column(temperature),
        top_k=column(top_k) if top_k.any() else None,
        max_top_k=int(top_k.max()),
        top_p=column(top_p) if (top_p < 1.0).any() else None,
        log_min_p=column(log_min_p) if (log_min_p > -np.inf).any() else None,
    )


def sample(
    logits: torch.Tensor, random: RandomRows | None, *, native: bool = False
) -> torch.Tensor:
    """One token per row of the fp32 logits [R, vocab]: int64 [R].

    With `native` the compiled CPU library draws.
    """
    if native:
        parameters = None if random is None else _parameters(random)
        return sample_native(logits, parameters, None if random is None else random.rows)
    if random is None:
        return logits.argmax(dim=-1)
    if random.rows is None:
        return _draw(logits, random)
    tokens = logits.argmax(dim=-1)
    return tokens.index_copy_(0, random.rows, _draw(logits.index_select(0, random.rows), random))


def masked_logits(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Logits over temperature, with -inf where min-p, top-k or top-p leave a token out."""
    return torch_draws.masked_logits(
        logits,
        temperature=random.temperature,
        top_k=random.top_k,
        max_top_k=random.max_top_k,
        top_p=random.top_p,
        log_min_p=random.log_min_p,
    )


def _draw(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """The argmax of logits plus Gumbel noise is distributed as their softmax."""
    if registry.uses_triton(logits):
        return sample_tokens(logits, _parameters(random))
    scaled = masked_logits(logits, random)
    noise = gumbel_noise(random.seeds, random.positions, logits.shape[-1])
    return noise.add_(scaled).argmax(dim=-1)


def _parameters(random: RandomRows) -> SamplingParameters:
    return SamplingParameters(
        temperature=random.temperature,
        seeds=random.seeds,
        positions=random.positions,
        top_k=random.top_k,
        top_p=random.top_p,
        log_min_p=random.log_min_p,
    )
