"""How far a draft model's guess can be trusted, by the probability that it gives it itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from worker.rank.speculation.confidence import Shares

LEVELS: Final = np.array([0.995, 0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.0], dtype=np.float32)
"""Least probability of each level."""
_PRIORS: Final = (0.995, 0.98, 0.96, 0.92, 0.85, 0.72, 0.58, 0.42, 0.2)
"""Shares of right guesses that are supposed before any is known: as if both models agreed."""
_KEEP, _KEEP_OWN = 0.98, 0.9
"""Weights that a guess keeps with each later one of its level, of any request and of its own."""
_PRIOR_WEIGHT = 3.0
"""Guesses of its own that weigh as much, for a request, as what all requests tell; and guesses
that tell these as much as the priors."""


class Certainty:
    """Learns from every guess whose place is known to have been reached, verified or not.

    Args:
        num_slots: rows of the tables.
    """

    def __init__(self, num_slots: int) -> None:
        self._common = Shares(len(_PRIORS))
        self._own = [Shares(len(_PRIORS)) for _ in range(num_slots)]
        self.shares = np.tile(np.array(_PRIORS, dtype=np.float32), (num_slots, 1))
        """[slots, levels]: how likely a guess is right; the array stays where it is."""

    def admit(self, slot: int) -> None:
        """Forgets what it knows of the slot."""
        self._own[slot] = Shares(len(_PRIORS))
        self._update(slot)

    def observe(self, slot: int, levels: Sequence[int], num_right: int, num_known: int) -> None:
        """Takes the outcome of a row of guesses.

        Args:
            slot: whose.
            levels: of the guesses.
            num_right: of them, before the first that was wrong.
            num_known: how many tokens came in their places.
        """
        own = self._own[slot]
        for place in range(min(num_right + 1, num_known)):
            self._common.observe(levels[place], place < num_right, _KEEP)
            own.observe(levels[place], place < num_right, _KEEP_OWN)
        self._update(slot)

    def _update(self, slot: int) -> None:
        own, common = self._own[slot], self._common
        self.shares[slot] = [
            own.value(level, common.value(level, prior, _PRIOR_WEIGHT), _PRIOR_WEIGHT)
            for level, prior in enumerate(_PRIORS)
        ]
