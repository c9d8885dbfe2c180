"""A real embedding model (all-MiniLM-L6-v2, 23 million parameters) against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from transformers import AutoModel, PreTrainedTokenizerFast

from cluster.bench.report import Check, at_least, exactly, note
from cluster.launch import LocalFleet
from tests.campaigns.checks import serve_config
from tests.campaigns.real.texts import PASSAGES

PAIRS: Final = (
    ("What is the capital of France?", "Paris has been the seat of the French government."),
    ("How do plants make food?", "In photosynthesis, leaves turn light and water into sugar."),
    ("My phone does not turn on.", "Charge the battery for an hour, then hold the power button."),
    ("Who wrote Hamlet?", "Shakespeare finished the tragedy of the Danish prince around 1600."),
    ("I want my money back.", "Refunds are paid within two weeks after a return."),
    (
        "How is bread baked?",
        "Knead flour, yeast and water, let the dough rise, and put it in the oven.",
    ),
)
"""Questions, and the text that answers each."""
_OTHERS: Final = (
    "a",
    "Grüße aus München!",
    "用一句话介绍北京。",
    "👩‍👩‍👧‍👦 🦄",
    "def f(x): return x",
)
_PASSAGE_WORDS = 120
"""Words of each passage: fewer than the 256 tokens that the model was trained with."""
_MODEL = "minilm"
_COSINE = 0.99999
"""Minimum cosine similarity to the vector of transformers."""
_TIMEOUT_S = 120.0


def make_texts() -> list[str]:
    """Questions, then their answers, then other texts."""
    passages = [" ".join(passage.split()[:_PASSAGE_WORDS]) for passage in PASSAGES]
    questions, answers = zip(*PAIRS, strict=True)
    return [*questions, *answers, *_OTHERS, *passages]


def reference_vectors(folder: Path, texts: Sequence[str]) -> tuple[torch.Tensor, int]:
    """Normalized means of transformers' last hidden states in fp32, [texts, hidden], and the number
    of tokens of all texts."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors, num_tokens = [], 0
    for text in texts:
        token_ids = tokenizer(text)["input_ids"]
        num_tokens += len(token_ids)
        with torch.inference_mode():
            states = model(torch.tensor([token_ids])).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states.mean(dim=0), dim=0))
    return torch.stack(vectors), num_tokens


def check_embeddings(folder: Path) -> list[Check]:
    """Checks that a worker's vectors over HTTP equal transformers' and do not depend on the batch.

    Args:
        folder: checkpoint with the files of sentence-transformers.
    """
    texts = make_texts()
    expected, num_tokens = reference_vectors(folder, texts)
    config = serve_config(_MODEL, str(folder), dtype="float32", batch_invariant=True, cpu_threads=1)
    with (
        LocalFleet(config, report=note) as fleet,
        httpx.Client(base_url=fleet.base_url, timeout=_TIMEOUT_S) as client,
    ):
        together, counted = _embed(client, texts)
        alone = [_embed(client, [text])[0][0] for text in texts]
    changed = sum(one != other for one, other in zip(together, alone, strict=True))
    return [
        *judge_vectors(torch.tensor(together), expected),
        exactly("embeddings_tokens", counted - num_tokens, "tokens", 0),
        exactly("embeddings_changed", changed, "vectors", 0),
    ]


def judge_vectors(vectors: torch.Tensor, expected: torch.Tensor) -> list[Check]:
    """Checks of vectors [texts, hidden], in the order of `make_texts`."""
    cosines = torch.nn.functional.cosine_similarity(vectors, expected, dim=1)
    questions, answers = vectors[: len(PAIRS)], vectors[len(PAIRS) : 2 * len(PAIRS)]
    nearest = (questions @ answers.T).argmax(dim=1)
    answered = int((nearest == torch.arange(len(PAIRS))).sum())
    return [
        at_least("embeddings_cosine", float(cosines.min()), "cosine", _COSINE),
        exactly("embeddings_answered", answered, "questions", len(PAIRS)),
    ]


def _embed(client: httpx.Client, texts: Sequence[str]) -> tuple[list[list[float]], int]:
    """Vectors of texts in one request, and the number of tokens in its usage."""
    response = client.post("/v1/embeddings", json={"model": _MODEL, "input": list(texts)})
    response.raise_for_status()
    body = response.json()
    return [item["embedding"] for item in body["data"]], body["usage"]["prompt_tokens"]
