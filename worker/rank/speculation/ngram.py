"""N-gram proposer (prompt lookup): drafts the tokens that followed an earlier occurrence of the
request's latest tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from kernels import NgramLookup, draft_ngrams, follow_ngram
from worker.plan.plan import DraftRow
from worker.rank.placement import DevicePlacement
from worker.rank.speculation.base import NO_GUESSES, DraftRequest, Guesses, Proposer
from worker.rank.speculation.calibration import Calibration
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

_LONGEST, _SHORTEST = 12, 2
"""Maximum and minimum length of a match, in tokens."""
_LEAST_LENGTHS: Final = (_LONGEST, 8, 5, 3, _SHORTEST)
"""Minimum length of a match, by level."""
_PRIOR, _PRIOR_WEIGHT = 0.5, 1.0
_LEVELS: Final = [
    next((level for level, least in enumerate(_LEAST_LENGTHS) if length >= least), -1)
    for length in range(_LONGEST + 1)
]
"""Level by length of a match; -1 if it is too short."""


class NgramProposer(Proposer):
    """Drafts from the request's own tokens; takes about ten microseconds per row and no additional
    memory.

    Effective for edits, quotations and repetitive text. Known as prompt lookup decoding (Saxena
    2023) and as n-gram speculation. The number of drafts depends on the accuracy of earlier guesses
    with matches of the same length.

    Args:
        tables: the rank's tables, for the token pool.
    """

    def __init__(self, tables: DeviceTables) -> None:
        num_slots = tables.token_pool.shape[0]
        super().__init__(Calibration(num_slots, [_PRIOR] * len(_LEAST_LENGTHS), _PRIOR_WEIGHT))
        self._token_pool = tables.token_pool

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Guesses for each request, with as many drafts as are worth verifying; waits for the
        device."""
        found = self._find(requests)
        return [
            self._guesses(request, tokens, length, threshold)
            for request, (tokens, length) in zip(requests, found, strict=True)
        ]

    def draft(self, placement: DevicePlacement, windows: Sequence[DraftRow]) -> None:
        """Writes drafts to the token pool; arguments as in DeviceProposer."""
        if placement.longest > 1:
            drafts, _ = self.look_up(
                *(placement.slots, placement.newest),
                count=placement.longest - 1,
                num_tokens=max(row.start + row.length for row in windows) + 1,
            )
            placement.write(drafts)

    def look_up(
        self, slots: torch.Tensor, newest: torch.Tensor, *, count: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses [F, count] for the tokens after the newest ones, and the lengths [F] of their
        matches, on the device; does not wait for the device. Arguments as in `kernels.NgramLookup`.
        """
        lookup = NgramLookup(
            slots=slots,
            newest=newest,
            count=count,
            shortest=_SHORTEST,
            longest=_LONGEST,
            num_tokens=num_tokens,
        )
        return draft_ngrams(self._token_pool, lookup)

    def _find(self, requests: Sequence[DraftRequest]) -> Iterable[tuple[list[int], int]]:
        """Guesses and match length of each request, on the host."""
        if self._token_pool.is_cpu:  # small tensors would cost more than the lookup
            pool = self._token_pool.numpy()
            return [
                follow_ngram(
                    pool[slot, :num_tokens], count=count, shortest=_SHORTEST, longest=_LONGEST
                )
                for slot, num_tokens, count in requests
            ]
        rows = np.array([(slot, num_tokens - 1) for slot, num_tokens, _ in requests]).T.copy()
        slots, newest = to_device(torch.from_numpy(rows), self._token_pool.device).unbind()
        tokens, lengths = self.look_up(
            *(slots, newest),
            count=max(request.num_drafts for request in requests),
            num_tokens=max(request.num_tokens for request in requests),
        )
        return zip(tokens.tolist(), lengths.tolist(), strict=True)

    def _guesses(
        self, request: DraftRequest, tokens: list[int], length: int, threshold: float
    ) -> Guesses:
        if not length:
            return NO_GUESSES
        # With each right guess, the match of the next guess is one token longer.
        levels = [*_LEVELS[length:], *[0] * request.num_drafts][: request.num_drafts]
        num_drafts = self.calibration.num_worth(request.slot, levels, threshold)
        # One more than the drafts: the step also shows whether the last guess was right.
        kept = num_drafts + 1
        return Guesses(tokens[: len(levels)][:kept], levels[:kept], num_drafts)
