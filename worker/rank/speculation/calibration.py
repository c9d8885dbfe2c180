"""Calibration: estimates the probability that a guess is right from the outcomes of earlier guesses
of the same level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_KEEP, _KEEP_OWN = 0.98, 0.9
"""Factor by which a guess's weight decays with each later guess of the same level: in the shares
over all requests, and in those of its own request."""
_COMMON_WEIGHT = 3.0
"""Weight of the share over all requests: it counts as much as this number of a request's own
guesses."""


class _Shares:
    """Fractions of right guesses by level, with exponential decay."""

    __slots__ = ("_right", "_total")

    def __init__(self, num_levels: int) -> None:
        self._right = [0.0] * num_levels
        self._total = [0.0] * num_levels

    def observe(self, level: int, is_right: bool, keep: float) -> None:
        self._right[level] = self._right[level] * keep + is_right
        self._total[level] = self._total[level] * keep + 1.0

    def values(self, priors: Iterable[float], weight: float) -> list[float]:
        """The shares by level, with each of `priors` weighted as `weight` guesses."""
        return [
            (right + weight * prior) / (total + weight)
            for right, total, prior in zip(self._right, self._total, priors, strict=True)
        ]


class Calibration:
    """Estimates the probability that a guess is right, given its level (the proposer's confidence).

    Uses every guess whose predecessors were all right and whose true token is known, whether or not
    it was verified as a draft.

    Args:
        num_slots: number of slots.
        priors: assumed fractions of right guesses before any outcome, by level, best first.
        prior_weight: weight of the priors, in guesses (pseudo-counts).
    """

    def __init__(self, num_slots: int, priors: Sequence[float], prior_weight: float) -> None:
        self._priors = priors
        self._prior_weight = prior_weight
        self._common = _Shares(len(priors))
        self._requests = [_Shares(len(priors)) for _ in range(num_slots)]
        self.shares = np.tile(np.array(priors, dtype=np.float32), (num_slots, 1))
        """[slots, levels]: probability that a guess is right. Updated in place, since the compiled
        library keeps its address."""

    def admit(self, slot: int) -> None:
        """Resets the outcomes of the slot's guesses."""
        self._requests[slot] = _Shares(len(self._priors))
        self._update(slot)

    def reset(self) -> None:
        """Resets the outcomes of all guesses."""
        self._common = _Shares(len(self._priors))
        for slot in range(len(self._requests)):
            self.admit(slot)

    def observe(self, slot: int, levels: Sequence[int], num_right: int, num_known: int) -> None:
        """Updates the shares with the outcome of consecutive guesses.

        Args:
            slot: the request's slot.
            levels: levels of the guesses.
            num_right: number of leading guesses that are right.
            num_known: number of leading guesses whose true token is known.
        """
        request, common = self._requests[slot], self._common
        for order, level in enumerate(levels[: min(num_right + 1, num_known)]):
            common.observe(level, order < num_right, _KEEP)
            request.observe(level, order < num_right, _KEEP_OWN)
        self._update(slot)

    def num_worth(self, slot: int, levels: Sequence[int], threshold: float) -> int:
        """Number of leading guesses whose acceptance probability, the product of their shares, is
        at least `threshold`."""
        shares, probability = self.shares[slot].tolist(), 1.0
        for number, level in enumerate(levels):
            probability *= shares[level]
            if probability < threshold:
                return number
        return len(levels)

    def _update(self, slot: int) -> None:
        common = self._common.values(self._priors, self._prior_weight)
        self.shares[slot] = self._requests[slot].values(common, _COMMON_WEIGHT)
