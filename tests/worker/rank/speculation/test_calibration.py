"""Acceptance probabilities by level, from outcomes of earlier guesses."""

from __future__ import annotations

import numpy as np
import pytest

from worker.rank.speculation.calibration import Calibration
from worker.rank.speculation.draft_model import LEAST_PROBABILITIES, PRIOR_WEIGHT, PRIORS


def calibration_of(num_slots: int) -> Calibration:
    return Calibration(num_slots, PRIORS, PRIOR_WEIGHT)


def test_shares_begin_with_the_models_word_and_follow_what_comes() -> None:
    calibration = calibration_of(3)
    first = calibration.shares[0].copy()
    assert (np.diff(first) < 0.0).all(), "the surer, the likelier"
    assert (first >= LEAST_PROBABILITIES - 0.01).all()
    for _ in range(40):
        calibration.observe(0, [0, 0, 5], num_right=1, num_known=3)
        calibration.observe(1, [0, 0, 5], num_right=3, num_known=3)
    calibration.admit(2)
    calibration.observe(0, [], num_right=0, num_known=0)
    failing, right, fresh = calibration.shares.copy()
    assert failing[0] == pytest.approx(0.5, abs=0.1)
    assert right[0] > 0.9 > fresh[0] > failing[0], "a request knows itself best"
    assert right[5] > 0.9
    assert failing[5] == pytest.approx(fresh[5], abs=0.01), "nothing is learned after a wrong guess"
    calibration.admit(0)
    assert calibration.shares[0] == pytest.approx(fresh)


def test_a_reset_forgets_what_all_requests_taught() -> None:
    calibration = calibration_of(2)
    before = calibration.shares.copy()
    for slot in range(2):
        calibration.observe(slot, [0, 1], num_right=0, num_known=2)
    assert (calibration.shares != before).any()
    calibration.reset()
    assert (calibration.shares == before).all()
    calibration.admit(1)
    assert (calibration.shares == before).all()


def test_a_guess_whose_place_is_not_known_yet_counts_for_nothing() -> None:
    calibration, other = calibration_of(1), calibration_of(1)
    calibration.observe(0, [2, 3, 4], num_right=1, num_known=1)
    other.observe(0, [2], num_right=1, num_known=1)
    assert (calibration.shares == other.shares).all()


def test_a_threshold_ends_guesses_by_what_the_request_itself_shows() -> None:
    calibration = Calibration(2, [0.5, 0.5], 1.0)
    levels = [1, 0, 0, 0]
    assert calibration.num_worth(0, levels, 0.6) == 0
    assert calibration.num_worth(0, levels, 0.2) == 2
    for _ in range(30):
        calibration.observe(0, levels, num_right=4, num_known=4)
        calibration.observe(1, levels, num_right=0, num_known=1)
    assert calibration.num_worth(0, levels, 0.3) == 4
    assert calibration.num_worth(1, levels, 0.3) == 0
