"""Prompt lookup: which occurrence is followed, how far, and what is learnt from guesses."""

from __future__ import annotations

import numpy as np
import pytest

from worker.rank.speculation.base import DraftRequest, Tokens
from worker.rank.speculation.confidence import Confidence, Guess
from worker.rank.speculation.ngram import NgramIndex, NgramProposer, follow


def tokens_of(text: str) -> Tokens:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def longest_before(tokens: list[int], sizes: list[int]) -> tuple[int, int] | None:
    """What `find` is to find, by looking everywhere."""
    for level, size in enumerate(sizes):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                return level, place
    return None


@pytest.mark.parametrize("step", [1, 3, 50])
def test_the_longest_latest_occurrence_is_found_however_the_text_grows(step: int) -> None:
    sizes = [5, 3, 2]
    tokens = np.random.default_rng(4).integers(0, 4, 400).astype(np.int32)
    index = NgramIndex(sizes)
    found = 0
    for length in range(1, len(tokens), step):
        index.extend(tokens[:length])
        match = index.find(tokens[:length])
        assert match == longest_before(tokens[:length].tolist(), sizes)
        found += match is not None
    assert found


def test_text_that_repeats_itself_goes_on_as_it_began() -> None:
    tokens = tokens_of("xyzabcabc")
    assert follow(tokens, 6, 7) == tokens_of("abcabca").tolist()
    assert follow(tokens, 3, 2) == tokens_of("ab").tolist()


def propose(proposer: NgramProposer, text: str, most: int = 8, threshold: float = 0.0) -> str:
    [draft] = proposer.propose([DraftRequest(0, tokens_of(text), most)], threshold)
    return bytes(draft).decode()


def test_an_edit_is_followed_again_after_the_changed_word() -> None:
    proposer = NgramProposer(12, 2)
    source = "The fox is near the hen. The hen is old.|"
    assert propose(proposer, source + "The ") == "hen is o"
    assert propose(proposer, source + "The goat is n") == "ear the "
    proposer.admit(0)
    assert propose(proposer, "nothing like it") == "", "of another request nothing is left"


def test_a_threshold_cuts_what_is_unlikely_and_guesses_are_learnt_undrafted() -> None:
    proposer = NgramProposer(4, 2)
    text = "abcdef" * 30
    assert propose(proposer, text[:40], threshold=0.9) == "", "a guess counts half at first"
    for length in range(41, 100):
        propose(proposer, text[:length], threshold=0.9)
    assert len(propose(proposer, text[:100], threshold=0.5)) == 8


def test_confidence_falls_by_what_the_request_itself_shows() -> None:
    confidence = Confidence([4, 2])
    good, bad = confidence.shares(), confidence.shares()
    for position in range(30):
        confidence.observe(good, Guess(position, 7, 0), 7)
        confidence.observe(bad, Guess(position, 7, 0), 8)
    assert confidence.num_worth(good, 0, 8, 0.3) > confidence.num_worth(bad, 0, 8, 0.3) == 0
