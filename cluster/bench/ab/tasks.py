"""The prompts of `rayfleet bench speculative`: held-out questions, texts to copy, and noise."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cluster.bench.engine import Request, random_prompt
from worker.wire.sampling import SamplingParams
from worker.wire.tokenizer import load_tokenizer

_MOST_TOKENS = 160
_COPIED = 8
"""Sentences to copy in one request."""
_SENTENCE = re.compile(r"[A-Z][a-z]+(?: [a-z]+){6,}\.")
"""Sentences of seven words or more: the demo copies these, and excuses itself from others."""
_NUM_RANDOM, _RANDOM_LENGTH = 256, 48
_SEED = 3


def make_tasks(kind: str, model: str, questions: str, vocab_size: int) -> list[Request]:
    """All requests of a kind, in a fixed order that mixes families: turns are to be alike.

    Args:
        kind: heldout: the file's questions; copy: the sentences of its answers about
            copying, several at once to be given back; random: tokens without sense, drawn on at
            temperature 1, which nobody can guess. These are of unlike lengths, as users' are: were
            all as long, then without drafts, and only without, all would end in the same step, and
            the prompts of those that follow be computed in one.
        model: folder with a chat template.
        questions: JSON lines with `messages` and `answer`.
        vocab_size: of the model.
    """
    if kind == "random":
        lengths = np.random.default_rng(_SEED).integers(64, 129, _NUM_RANDOM).tolist()
        return [
            Request(
                random_prompt((_SEED, number), vocab_size, _RANDOM_LENGTH),
                SamplingParams(temperature=1.0, seed=number, max_tokens=length, ignore_eos=True),
            )
            for number, length in enumerate(lengths)
        ]
    lines = [json.loads(line) for line in Path(questions).read_text().splitlines()]
    conversations = [line["messages"] for line in lines]
    if kind == "copy":
        answers = [line["answer"] for line in lines if line["family"] == "copying"]
        sentences = sorted({one for answer in answers for one in _SENTENCE.findall(answer)})
        conversations = [
            [{"role": "user", "content": f"Repeat exactly: {_text(sentences, number)}"}]
            for number in range(len(sentences))
        ]
    tokenizer = load_tokenizer(model)
    sampling = SamplingParams(temperature=0.0, max_tokens=_MOST_TOKENS)
    encoded = [
        tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        for messages in conversations
    ]
    tasks = [Request(np.asarray(ids, dtype="<i4").tobytes(), sampling) for ids in encoded]
    return [tasks[place] for place in np.random.default_rng(_SEED).permutation(len(tasks))]


def _text(sentences: Sequence[str], number: int) -> str:
    picked = [sentences[(number + 7 * place) % len(sentences)] for place in range(_COPIED)]
    return " ".join(picked)
