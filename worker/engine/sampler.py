"""Draws tokens: argmax for greedy rows, keyed Gumbel noise for the others.

HAZARD(invariance): a row's draw must not depend on the other rows. Everything here works within
one row: softmax, top-k and running sums do, but `sum` and `mean` of a single long row are split
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
    max_top_k: int
    """Largest of them, known without asking the device."""
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
        max_top_k=int(top_k.max()),
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
        _apply_top_k(scaled, random.top_k, random.max_top_k)
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


def _apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> None:
    """Keeps whatever equals the k-th value too, so that ties are not cut arbitrarily."""
    largest = logits.topk(min(max_top_k, logits.shape[-1]), dim=-1).values
    last_kept = (top_k - 1).clamp_(min=0, max=largest.shape[-1] - 1)
    threshold = largest.gather(1, last_kept.unsqueeze(1))
    threshold.masked_fill_((top_k == 0).unsqueeze(1), float("-inf"))
    logits.masked_fill_(logits < threshold, float("-inf"))


def _apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keeps the likeliest tokens until they hold `top_p`, and whatever equals the last of them."""
    probabilities = logits.softmax(dim=-1)
    threshold, is_reached = _nucleus_threshold(probabilities, top_p, _nucleus_width(logits))
    if not logits.is_cuda:  # there the width is the whole vocabulary, and asking would wait
        (flat,) = (~is_reached).nonzero(as_tuple=True)
        if len(flat):
            threshold[flat], _ = _nucleus_threshold(
                probabilities.index_select(0, flat), top_p[flat], logits.shape[-1]
            )
    # Without this, tokens whose probability rounds to zero would be dropped from rows that keep
    # all, but only where another row of the batch uses top-p.
    threshold.masked_fill_(top_p >= 1.0, 0.0)
    logits.masked_fill_(probabilities < threshold.unsqueeze(1), float("-inf"))


def _nucleus_width(logits: torch.Tensor) -> int:
    """How many of the likeliest tokens to look at first: sorting all is slow on CPU."""
    vocab_size = logits.shape[-1]
    return vocab_size if logits.is_cuda else min(vocab_size, 256)


def _nucleus_threshold(
    probabilities: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least probability kept in each row, and whether the `width` likeliest suffice to tell."""
    likeliest = probabilities.topk(width, dim=-1).values
    cumulative = likeliest.cumsum(dim=-1)
    # A token stays if those before it hold less than top_p.
    num_before = (cumulative[:, :-1] < top_p.unsqueeze(1)).sum(dim=-1, keepdim=True)
    is_reached = (cumulative[:, -1] >= top_p) | (top_p >= 1.0)
    return likeliest.gather(1, num_before).squeeze(1), is_reached
