"""How far guesses can be trusted, by what became of earlier ones like them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_KEEP, _KEEP_OWN = 0.98, 0.9
"""Weights that a guess keeps with each later one of its level, of any request and of its own."""
_COMMON_WEIGHT = 3.0
"""Guesses of its own that weigh as much, for a request, as what all requests' tell."""


class _Shares:
    """Shares of right guesses by level, with forgetting."""

    __slots__ = ("_right", "_total")

    def __init__(self, num_levels: int) -> None:
        self._right = [0.0] * num_levels
        self._total = [0.0] * num_levels

    def observe(self, level: int, is_right: bool, keep: float) -> None:
        self._right[level] = self._right[level] * keep + is_right
        self._total[level] = self._total[level] * keep + 1.0

    def values(self, priors: Iterable[float], weight: float) -> list[float]:
        """The shares, where `priors` count as much as `weight` guesses each."""
        return [
            (right + weight * prior) / (total + weight)
            for right, total, prior in zip(self._right, self._total, priors, strict=True)
        ]


class Calibration:
    """Tells how likely a guess is right, from its level: what the proposer makes of it.

    Learns from every guess whose place is known to have been reached, verified or not.

    Args:
        num_slots: rows of the tables.
        priors: by level, best first: shares of right guesses that are supposed before any is known.
        prior_weight: guesses of all requests that weigh as much as the priors.
    """

    def __init__(self, num_slots: int, priors: Sequence[float], prior_weight: float) -> None:
        self._priors = priors
        self._prior_weight = prior_weight
        self._common = _Shares(len(priors))
        self._own = [_Shares(len(priors)) for _ in range(num_slots)]
        self.shares = np.tile(np.array(priors, dtype=np.float32), (num_slots, 1))
        """[slots, levels]: how likely a guess is right; the array stays where it is."""

    def admit(self, slot: int) -> None:
        """Forgets what the slot's own guesses taught."""
        self._own[slot] = _Shares(len(self._priors))
        self._update(slot)

    def reset(self) -> None:
        """Forgets what all guesses taught."""
        self._common = _Shares(len(self._priors))
        for slot in range(len(self._own)):
            self.admit(slot)

    def observe(self, slot: int, levels: Sequence[int], num_right: int, num_known: int) -> None:
        """Takes the outcome of consecutive guesses.

        Args:
            slot: the request's.
            levels: of the guesses.
            num_right: how many are right, up to the first that is not.
            num_known: in place of how many the token is known.
        """
        own, common = self._own[slot], self._common
        for order, level in enumerate(levels[: min(num_right + 1, num_known)]):
            common.observe(level, order < num_right, _KEEP)
            own.observe(level, order < num_right, _KEEP_OWN)
        self._update(slot)

    def num_worth(self, slot: int, levels: Sequence[int], threshold: float) -> int:
        """How many consecutive guesses are each reached and right with at least a probability."""
        shares, probability = self.shares[slot].tolist(), 1.0
        for number, level in enumerate(levels):
            probability *= shares[level]
            if probability < threshold:
                return number
        return len(levels)

    def _update(self, slot: int) -> None:
        common = self._common.values(self._priors, self._prior_weight)
        self.shares[slot] = self._own[slot].values(common, _COMMON_WEIGHT)
