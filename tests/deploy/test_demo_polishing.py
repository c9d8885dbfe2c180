"""The third phase: out-of-scope messages, and lists of arbitrary words."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from random import Random
from string import ascii_lowercase

import pytest
import torch
from tokenizers import Tokenizer

from deploy.models.calling import tool_conversations
from deploy.models.corpus import read_questions
from deploy.models.evaluate import accuracy_by_family
from deploy.models.sample import is_heldout_key
from deploy.models.tasks.lists import sorting_any
from deploy.models.tasks.outside import outside
from deploy.models.tasks.smalltalk import UNKNOWN
from tests.support.effort import IS_LONG
from tests.support.paths import DEMO, MODELS

HELDOUT = read_questions(MODELS / "demo_heldout_first_words.jsonl")


def test_messages_from_outside_have_one_answer_and_are_of_all_kinds() -> None:
    rng = Random(3)
    turns = [outside(rng).turns[0] for _ in range(5000)]
    assert {turn.assistant for turn in turns} == {UNKNOWN}
    questions = {turn.user for turn in turns}
    assert len(questions) > 3500
    text = "".join(questions)
    for some in "éß你は한пршאم{}<>|`":
        assert some in text, some
    assert len(set(text.encode())) > 180, "some bytes would be strange to the model"
    assert max(map(len, questions)) > 1000
    assert min(map(len, questions)) <= 1


def test_training_never_draws_a_heldout_message() -> None:
    heldout = {str(question.messages[-1]["content"]) for question in HELDOUT}
    assert len(heldout) == len(HELDOUT) == 94
    drawn = {
        turn.user
        for conversation in islice(tool_conversations(Random(5), is_polishing=True), 5000)
        for turn in conversation.turns
    }
    # Short ones are sampled by chance.
    assert not {text for text in heldout & drawn if len(text) > 3}


def test_lists_are_in_order() -> None:
    rng = Random(1)
    for sample in (sorting_any(rng) for _ in range(2000)):
        [turn] = sample.turns
        separator = next((one for one in (", ", "\n", ",") if one in turn.assistant), " ")
        items = turn.assistant.strip("[]").split(separator)
        numbers = [int(item) for item in items if item.isdigit()]
        if len(numbers) == len(items):
            assert numbers in (sorted(numbers), sorted(numbers, reverse=True))
        else:
            assert [item.lower() for item in items] == sorted(item.lower() for item in items)
        assert all(item in turn.user for item in items)


def test_lists_have_words_with_any_letters() -> None:
    """A pool of common words alone leaves the alphabetical rank of many tokens unknown."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rng = Random(6)
    texts = [sorting_any(rng).turns[0].user for _ in range(8000)]
    seen = {token for text in texts for token in tokenizer.encode(text).tokens}
    beginnings = [t for t in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]+", t)]
    assert sum(token in seen for token in beginnings) > 0.65 * len(beginnings)
    first_letters = Counter(word[0] for text in texts for word in re.findall(r" ([a-z]+)", text))
    assert min(first_letters[letter] for letter in ascii_lowercase if letter != "x") > 150


def test_heldout_lists_stay_held_out() -> None:
    turns = [
        turn
        for conversation in islice(tool_conversations(Random(2), is_polishing=True), 1500)
        for turn in conversation.turns
    ]
    sorts = [turn for turn in turns if turn.user.lower().startswith("sort these words: ")]
    assert len(sorts) > 30
    for turn in sorts:
        listed = turn.user.split(": ", 1)[1]
        if "\n" not in listed and "[" not in listed:
            items = listed.replace(",", " ").split()
            assert not is_heldout_key(f"sort:{' '.join(items)}")


@pytest.mark.parametrize("is_polishing", [False, True])
def test_phases_have_their_kinds(is_polishing: bool) -> None:
    conversations = list(islice(tool_conversations(Random(4), is_polishing=is_polishing), 600))
    sorts = sum(c.turns[0].user.lower().startswith("sort") for c in conversations)
    assert (sorts > 150) == is_polishing
    assert any(c.system and "<tools>" in c.system for c in conversations)


@pytest.mark.randomized  # with all questions
def test_the_demo_says_what_it_can_do_and_sorts_any_words() -> None:
    """All 72 messages and 19 of 22 lists; weights of the second phase had 46 and 3 correct."""
    torch.set_num_threads(1)
    accuracy = accuracy_by_family(DEMO, HELDOUT if IS_LONG else HELDOUT[::2])
    assert accuracy["outside"] >= 0.95, accuracy
    assert accuracy["sorting_any"] >= 0.75, accuracy
