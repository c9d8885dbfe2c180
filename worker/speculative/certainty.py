"""How far a draft model's guess can be trusted, by the probability that it gives it itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.engine.tables import IntArray

LEVELS: Final = np.array([0.995, 0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.0], dtype=np.float32)
"""Least probability of each level."""
_PRIORS: Final = np.array([0.995, 0.98, 0.96, 0.92, 0.85, 0.72, 0.58, 0.42, 0.2])
"""Shares of right guesses that are supposed before any is known: as if both models agreed."""
_KEEP, _KEEP_OWN = 0.98, 0.9
"""Weights that a guess keeps with each later one of its level, of any request and of its own."""
_PRIOR_WEIGHT = 3.0
"""Guesses of its own that weigh as much, for a request, as what all requests tell."""


class Certainty:
    """Learns from every guess whose place is known to have been reached, verified or not.

    Args:
        num_slots: rows of the tables.
    """

    def __init__(self, num_slots: int) -> None:
        self._right, self._total = _PRIORS * 4.0, np.full(len(_PRIORS), 4.0)
        self._own_right = np.zeros((num_slots, len(_PRIORS)))
        self._own_total = np.zeros((num_slots, len(_PRIORS)))

    def admit(self, slot: int) -> None:
        """Forgets what it knows of the slot."""
        self._own_right[slot] = self._own_total[slot] = 0.0

    def observe(self, slot: int, levels: Sequence[int], num_right: int, num_known: int) -> None:
        """Takes the outcome of a row of guesses.

        Args:
            slot: whose.
            levels: of the guesses.
            num_right: of them, before the first that was wrong.
            num_known: how many tokens came in their places.
        """
        for place in range(min(num_right + 1, num_known)):
            level, right = levels[place], float(place < num_right)
            self._right[level] = self._right[level] * _KEEP + right
            self._total[level] = self._total[level] * _KEEP + 1.0
            self._own_right[slot, level] = self._own_right[slot, level] * _KEEP_OWN + right
            self._own_total[slot, level] = self._own_total[slot, level] * _KEEP_OWN + 1.0

    def shares(self, slots: IntArray) -> npt.NDArray[np.float32]:
        """[slots, levels]: how likely a guess is right."""
        common = _PRIOR_WEIGHT * self._right / self._total
        own: npt.NDArray[np.float32] = (
            (self._own_right[slots] + common) / (self._own_total[slots] + _PRIOR_WEIGHT)
        ).astype(np.float32)
        return own
