"""Prompt lookup: the matched occurrence, the number of drafts, and calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import NgramLookup, draft_ngrams
from worker.rank.speculation.base import DraftRequest, Guesses
from worker.rank.speculation.ngram import NgramProposer
from worker.rank.tables import DeviceTables

SHORTEST, LONGEST = 2, 5


def longest_before(tokens: list[int]) -> tuple[int, int]:
    """Continuation of the longest latest occurrence, and its length, by exhaustive search."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                return place, size
    return len(tokens) - 1, 0


@pytest.mark.parametrize("step", [1, 3, 50])
def test_the_longest_latest_occurrence_is_found_however_the_text_grows(step: int) -> None:
    pool = torch.from_numpy(np.random.default_rng(4).integers(0, 4, (3, 400)).astype(np.int32))
    slots = torch.tensor([2, 0])
    num_found = 0
    for length in range(1, 400 - step, step):
        newest = torch.tensor([length - 1, length - 1 + step])
        lookup = NgramLookup(
            slots=slots,
            newest=newest,
            count=1,
            shortest=SHORTEST,
            longest=LONGEST,
            num_tokens=length + step,
        )
        drafts, lengths = draft_ngrams(pool, lookup)
        for slot, last, [draft], found in zip(
            slots.tolist(), newest.tolist(), drafts.tolist(), lengths.tolist(), strict=True
        ):
            place, size = longest_before(pool[slot, : last + 1].tolist())
            assert (draft, found) == (int(pool[slot, place]), size)
            num_found += size > 0
    assert num_found


class Lookup:
    """A proposer, and one slot's text."""

    def __init__(self) -> None:
        self.tables = DeviceTables(
            max_num_seqs=1,
            max_model_len=200,
            page_size=8,
            vocab_size=256,
            device=torch.device("cpu"),
        )
        self.proposer = NgramProposer(self.tables)

    def guesses(self, text: str, most: int = 8, threshold: float = 0.0) -> Guesses:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        self.tables.token_pool[0, : len(tokens)] = torch.from_numpy(tokens)
        [found] = self.proposer.propose([DraftRequest(0, len(tokens), most)], threshold)
        return found

    def drafts(self, text: str, most: int = 8, threshold: float = 0.0) -> str:
        return bytes(self.guesses(text, most, threshold).drafts).decode()


def test_repeated_text_is_continued_as_before() -> None:
    assert Lookup().drafts("xyzabcabc", most=7) == "abcabca"
    assert Lookup().drafts("xyzabcabc", most=2) == "ab"


def test_an_edit_is_followed_again_after_the_changed_word() -> None:
    lookup = Lookup()
    source = "The fox is near the hen. The hen is old.|"
    assert lookup.drafts(source + "The ") == "hen is o"
    assert lookup.drafts(source + "The goat is n") == "ear the "
    assert lookup.guesses("nothing like it").token_ids == []


def test_a_threshold_cuts_what_is_unlikely_and_guesses_are_learned_undrafted() -> None:
    lookup, text = Lookup(), "abcdef" * 30
    unlikely = lookup.guesses(text[:40], threshold=0.9)
    assert (unlikely.num_drafts, len(unlikely.token_ids)) == (0, 1), "a guess counts half at first"
    for length in range(41, 100):
        guesses = lookup.guesses(text[:length], threshold=0.9)
        lookup.proposer.observe(0, guesses, num_right=1, num_known=1)
    assert len(lookup.drafts(text[:100], threshold=0.5)) == 8


def test_no_draft_ends_a_request() -> None:
    guesses = Guesses([5, 6, 7, 8], [0, 0, 0, 0], 3)
    assert guesses.up_to({9}).drafts == [5, 6, 7]
    assert guesses.up_to({8}).drafts == [5, 6, 7], "it is not drafted"
    assert guesses.up_to({6}).drafts == [5]
    assert guesses.up_to({5, 7}).drafts == []
