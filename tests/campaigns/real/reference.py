"""transformers as the reference for an engine's output, and the perplexity of texts under both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.engines.engine_driver import Engine, Outcome
from worker.protocol.sampling import SamplingParams

NEAR_TIE = 1e-3
"""Difference between two logits, in nats, below which the order of fp32 sums can change the greedy
token. Logits of models of this size differ by up to 1e-4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference between an engine's greedy output and transformers'."""

    wrong_tokens: int
    """Number of tokens that transformers would not choose after the same tokens, excluding near
    ties."""
    near_ties: int
    """Number of tokens that are second best by less than `NEAR_TIE`."""
    logprob: float
    """Maximum difference between log-probabilities, in nats."""


class Reference:
    """A checkpoint in transformers, in fp32 on one thread.

    Args:
        folder: checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a chat, including the generation prompt."""
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def compare(
        self, prompts: Sequence[Sequence[int]], outcomes: Sequence[Outcome]
    ) -> list[Difference]:
        """Compares with one forward pass per output: if each token is the best after its
        predecessors, the output equals that of greedy decoding.

        Args:
            prompts: token ids of each prompt.
            outcomes: outcomes of greedy requests with log-probabilities.
        """
        pairs = zip(prompts, outcomes, strict=True)
        return [self._compare(prompt, outcome) for prompt, outcome in pairs]

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] fp32 after each token."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return logits.log_softmax(dim=-1)

    def perplexity(self, texts: Sequence[Sequence[int]]) -> float:
        """See `perplexity`."""
        return _perplexity([self._scored(text) for text in texts])

    def _compare(self, prompt: Sequence[int], outcome: Outcome) -> Difference:
        tokens = outcome.token_ids
        rows = self.logprobs([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        wrong = ties = 0
        largest = 0.0
        for row, token, given in zip(rows, tokens, outcome.logprobs, strict=True):
            gap = float(row.max() - row[token])
            wrong += gap > NEAR_TIE
            ties += 0 < gap <= NEAR_TIE
            known = zip(given.token_ids, given.logprobs, strict=True)
            largest = max(largest, *(abs(float(row[one]) - value) for one, value in known))
        return Difference(wrong_tokens=wrong, near_ties=ties, logprob=largest)

    def _scored(self, text: Sequence[int]) -> list[float]:
        rows = self.logprobs(text)
        return [float(row[token]) for row, (_, token) in zip(rows, pairwise(text), strict=False)]


def perplexity(engine: Engine, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-probability of all tokens except the first of each text.

    Lower is better. It measures the quality loss from quantized weights or caches.

    Args:
        engine: engine with the model in the format to measure.
        texts: token ids of each text, at least two.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scored = []
    for outcome in engine.outcomes(texts, params):
        assert outcome.prompt_logprobs is not None, outcome.error
        scored.append([token.logprobs[0] for token in outcome.prompt_logprobs])
    return _perplexity(scored)


def _perplexity(texts: Sequence[Sequence[float]]) -> float:
    values = [value for text in texts for value in text]
    return math.exp(-sum(values) / len(values))
