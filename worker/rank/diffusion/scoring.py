"""Scored positions of running blocks: their logits, after logits processors, and the
log-probabilities of tokens in the model's raw distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import SamplingParameters
from worker.protocol.messages import TokenLogprobs
from worker.rank.diffusion.base import BoolArray, IntArray
from worker.rank.sampling.logprobs import LogprobRows, score
from worker.rank.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPositions:
    """S scored positions of N blocks, in row-major order."""

    rows: npt.NDArray[np.int64]
    """[S]: index of each position's block."""
    columns: npt.NDArray[np.int64]
    """[S]: index of each position within its block."""
    logits: torch.Tensor
    """[S, vocab] fp32, after logits processors."""
    random: SamplingParameters | None
    """Sampling parameters [S]; None if all are greedy."""
    reported: LogprobRows | None
    """Positions whose requests return log-probabilities; None if there are none."""
    raw: torch.Tensor | None
    """[n, vocab] fp32: the model's logits of the n positions `reported`; None if there are none."""

    def logprobs(
        self, token_ids: IntArray, chosen: BoolArray
    ) -> list[tuple[int, int, TokenLogprobs]]:
        """Log-probabilities of tokens [N, B] at the positions in the mask `chosen` [N, B], each
        with its block and position in the block; positions whose requests do not return any are
        skipped. Waits for the device."""
        if self.reported is None or self.raw is None:
            return []
        samples = np.array(self.reported.rows_host)
        (kept,) = np.nonzero(chosen[self.rows[samples], self.columns[samples]])
        if not len(kept):
            return []
        rows, columns = self.rows[samples[kept]], self.columns[samples[kept]]
        tokens = torch.from_numpy(token_ids[rows, columns].astype(np.int64))
        device = self.raw.device
        found = score(
            self.raw.index_select(0, to_device(torch.from_numpy(kept), device)),
            to_device(tokens, device),
            [self.reported.num_top[index] for index in kept.tolist()],
        )
        return list(zip(rows.tolist(), columns.tolist(), found.to_host(), strict=True))
