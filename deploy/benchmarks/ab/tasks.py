"""Prompts of benchmark `speculative`: held-out questions, text to copy, and random tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deploy.benchmarks.engine import Request, random_prompt
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.tokenizer import load_tokenizer

_MOST_TOKENS = 160
_COPIED = 8
"""Number of sentences to copy in one request."""
_SENTENCE = re.compile(r"[A-Z][a-z]+(?: [a-z]+){6,}\.")
"""Pattern of a sentence of at least seven words; the demo model does not copy shorter ones."""
_NUM_RANDOM, _RANDOM_LENGTH = 256, 48
_SEED = 3


def make_tasks(kind: str, model: str, questions: str, vocab_size: int) -> list[Request]:
    """All requests of a kind, in a fixed random order, so that runs are alike.

    Args:
        kind: heldout: the questions in the file. copy: requests to repeat several sentences, taken
            from the file's answers to copying questions. random: random tokens, continued at
            temperature 1, which no draft predicts; output lengths vary, as in real traffic. With
            equal lengths and no drafts, all requests would end in the same step, and the next
            prompts would share one step.
        model: folder of a checkpoint with a chat template.
        questions: path of a JSON Lines file with `messages`, `answer` and `family`.
        vocab_size: size of the model's vocabulary.
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
