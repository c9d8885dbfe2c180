"""Draws tokens: argmax for greedy rows, keyed Gumbel noise for the others.

HAZARD(invariance): a row's draw must not depend on the other rows. Everything here works within
one row: softmax, sort and running sums do, but `sum` and `mean` of a single long row are split
over threads and are therefore avoided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import gumbel_noise
from worker.engine.tables import IntArray, SamplingColumns, to_device

_GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomRows:
    """Parameters of the rows that draw at random, [n] each; None where no row uses one."""

    rows: torch.Tensor | None
    """Which rows of the logits, int64; None for all."""
    seeds: torch.Tensor
    positions: torch.Tensor
    """Where the new tokens will stand."""
    temperature: torch.Tensor
    top_k: torch.Tensor | None
    """int64, 0 keeps all."""
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None


def gather_random_rows(
    columns: SamplingColumns, slots: IntArray, positions: IntArray, device: torch.device
) -> RandomRows | None:
    """Collects the parameters of a step's sampling rows; None where all are greedy."""
    temperature = columns.temperature[slots]
    (rows,) = np.nonzero(temperature >= _GREEDY_BELOW)
    if not len(rows):
        return None
    all_random = len(rows) == len(slots)
    slots, positions, temperature = slots[rows], positions[rows], temperature[rows]
    top_k, top_p, min_p = columns.top_k[slots], columns.top_p[slots], columns.min_p[slots]

    def column(values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)

    return RandomRows(
        rows=None if all_random else column(rows),
        seeds=column(columns.seed[slots]),
        positions=column(positions),
        temperature=column(temperature),
        top_k=column(top_k) if top_k.any() else None,
        top_p=column(top_p) if (top_p < 1.0).any() else None,
        min_p=column(min_p) if (min_p > 0.0).any() else None,
    )


def sample(logits: torch.Tensor, random: RandomRows | None) -> torch.Tensor:
    """One token per row of the fp32 logits [R, vocab]: int64 [R]."""
    if random is None:
        return logits.argmax(dim=-1)
    if random.rows is None:
        return _draw(logits, random)
    tokens = logits.argmax(dim=-1)
    return tokens.index_copy_(0, random.rows, _draw(logits.index_select(0, random.rows), random))


def masked_logits(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Logits over temperature, with -inf where min-p, top-k or top-p leave a token out.

    The order is vLLM's: temperature, min-p, top-k, then top-p on what top-k kept.
    """
    scaled = logits / random.temperature.unsqueeze(1)
    if random.min_p is not None:
        _apply_min_p(scaled, random.min_p)
    if random.top_k is not None:
        _apply_top_k(scaled, random.top_k)
    if random.top_p is not None:
        _apply_top_p(scaled, random.top_p)
    return scaled


def _draw(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """The argmax of logits plus Gumbel noise is distributed as their softmax."""
    scaled = masked_logits(logits, random)
    noise = gumbel_noise(random.seeds, random.positions, logits.shape[-1])
    return noise.add_(scaled).argmax(dim=-1)


def _apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    probabilities = logits.softmax(dim=-1)
    least = probabilities.amax(dim=-1, keepdim=True) * min_p.unsqueeze(1)
    logits.masked_fill_(probabilities < least, float("-inf"))


def _apply_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keeps whatever equals the k-th value too, so that ties are not cut arbitrarily."""
    vocab_size = logits.shape[-1]
    num_kept = top_k.clamp(max=vocab_size)
    # On CUDA this reads a number back; a bound by the host would sort the whole vocabulary.
    largest = logits.topk(int(num_kept.max()), dim=-1).values
    threshold = largest.gather(1, (num_kept - 1).clamp(min=0).unsqueeze(1))
    threshold.masked_fill_((top_k == 0).unsqueeze(1), float("-inf"))
    logits.masked_fill_(logits < threshold, float("-inf"))


def _apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Drops the unlikeliest tokens whose probabilities sum to at most 1 - p."""
    ascending, order = logits.sort(dim=-1, stable=True)
    cumulative = ascending.softmax(dim=-1).cumsum_(dim=-1)
    dropped = cumulative <= (1.0 - top_p).unsqueeze(1)
    dropped[:, -1] = False
    # Without this, tokens whose probability rounds to zero would be dropped from rows that keep
    # all, but only where another row of the batch uses top-p.
    dropped &= (top_p < 1.0).unsqueeze(1)
    logits.masked_fill_(torch.empty_like(dropped).scatter_(1, order, dropped), float("-inf"))
