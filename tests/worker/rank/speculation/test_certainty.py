"""What a draft model's own probability is worth, learnt from what became of its guesses."""

from __future__ import annotations

import numpy as np
import pytest

from worker.rank.speculation.certainty import LEVELS, Certainty


def test_shares_begin_with_the_models_word_and_follow_what_comes() -> None:
    certainty = Certainty(3)
    first = certainty.shares[0].copy()
    assert (np.diff(first) < 0.0).all(), "the surer, the likelier"
    assert (first >= LEVELS - 0.01).all()
    for _ in range(40):
        certainty.observe(0, [0, 0, 5], num_right=1, num_known=3)
        certainty.observe(1, [0, 0, 5], num_right=3, num_known=3)
    certainty.admit(2)
    certainty.observe(0, [], num_right=0, num_known=0)
    failing, right, fresh = certainty.shares.copy()
    assert failing[0] == pytest.approx(0.5, abs=0.1)
    assert right[0] > 0.9 > fresh[0] > failing[0], "a request knows itself best"
    assert right[5] > 0.9
    assert failing[5] == pytest.approx(fresh[5], abs=0.01), "behind a wrong guess nothing is learnt"
    certainty.admit(0)
    assert certainty.shares[0] == pytest.approx(fresh)


def test_a_guess_whose_place_is_not_known_yet_counts_for_nothing() -> None:
    certainty, other = Certainty(1), Certainty(1)
    certainty.observe(0, [2, 3, 4], num_right=1, num_known=1)
    other.observe(0, [2], num_right=1, num_known=1)
    assert (certainty.shares == other.shares).all()
