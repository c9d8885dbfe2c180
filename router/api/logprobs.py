"""Log-probabilities in responses: OpenAI's two shapes, and vLLM's for prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from router.api.slices import Kept, Rows
from worker.wire.messages import TokenLogprobs
from worker.wire.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Scored = tuple[int, TokenLogprobs | None]
"""A token and its log-probabilities; None for the first of a prompt, which nothing predicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Echoed:
    """The beginning of the `logprobs` of all choices of a prompt, where it is echoed."""

    columns: Mapping[str, Kept]
    """Columns by name."""
    length: int
    """Characters of its tokens."""


class LogprobFormat(ABC):
    """Writes the tokens of one response; keeps where each of its choices stands.

    Args:
        tokenizer: names the tokens.
        num_top: likeliest tokens to name beside each.
        by_id: whether tokens are named by their ids, which tells those apart that look alike.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._by_id = by_id
        self._offsets: dict[int, int] = {}

    def entries(
        self, index: int, tokens: Sequence[Scored], echoed: Echoed | None = None
    ) -> dict[str, Any]:
        """`logprobs` of choice `index` for its next tokens, with Rows; to be encoded in order.

        Args:
            index: of the choice.
            tokens: of it, that are new.
            echoed: its prompt, where that comes before them.
        """
        columns = self._columns(tokens, self._places(index, tokens, echoed))
        first = {} if echoed is None else echoed.columns
        return {name: Rows(items, first.get(name)) for name, items in columns.items()}

    def echoed(self, tokens: Sequence[Scored]) -> Echoed:
        """A prompt, for `entries` of all choices that have it: it is encoded once for all.

        With twenty log-probabilities, 4,096 tokens take 70 ms.
        """
        lengths = [len(token_text(self._tokenizer, token_id)) for token_id, _ in tokens]
        columns = self._columns(tokens, accumulate(lengths[:-1], initial=0))
        return Echoed(
            columns={name: Kept(items) for name, items in columns.items()}, length=sum(lengths)
        )

    def _places(self, index: int, tokens: Sequence[Scored], echoed: Echoed | None) -> Iterator[int]:
        if echoed is not None:
            self._offsets[index] = echoed.length
        for token_id, _ in tokens:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(token_text(self._tokenizer, token_id))
            yield offset

    @abstractmethod
    def _columns(self, tokens: Sequence[Scored], places: Iterable[int]) -> dict[str, Iterable[Any]]:
        """Tokens, and where each begins in the text, as a choice names them."""

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else token_text(self._tokenizer, token_id)


class ChatLogprobs(LogprobFormat):
    """A list of objects, one per token."""

    def _columns(self, tokens: Sequence[Scored], places: Iterable[int]) -> dict[str, Iterable[Any]]:
        return {"content": (self.entry(found) for _, found in tokens if found is not None)}

    def entry(self, found: TokenLogprobs) -> dict[str, Any]:
        """One token, with the likeliest beside it."""
        own, *others = [
            self._token(token_id, logprob)
            for token_id, logprob in zip(found.token_ids, found.logprobs, strict=True)
        ]
        return {**own, "top_logprobs": others[: self._num_top]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._name(token_id) if self._by_id else data.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }


class TextLogprobs(LogprobFormat):
    """Four columns, with the place of each token in the text."""

    def _columns(self, tokens: Sequence[Scored], places: Iterable[int]) -> dict[str, Iterable[Any]]:
        return {
            "tokens": (self._name(token_id) for token_id, _ in tokens),
            "token_logprobs": (
                None if found is None else finite(found.logprobs[0]) for _, found in tokens
            ),
            "top_logprobs": (None if found is None else self._top(found) for _, found in tokens),
            "text_offset": places,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """The token itself is named too, even where it is none of the likeliest."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(found.token_ids, found.logprobs, strict=True):
            top.setdefault(self._name(token_id), finite(logprob))
        return top


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs] | None) -> Rows | None:
    """vLLM's `prompt_logprobs`: for each prompt token an object by token id, None for the first.

    It may stand in several choices, and is encoded once.
    """
    if found is None:
        return None
    entries = (_prompt_entry(tokenizer, scored) for scored in found)
    return Rows((), Kept(chain((None,), entries)))


def _prompt_entry(tokenizer: Tokenizer, scored: TokenLogprobs) -> dict[str, Any]:
    token_ids = scored.token_ids
    ranks = (scored.rank, *range(1, len(token_ids)))
    entry: dict[str, Any] = {}
    for token_id, logprob, rank in zip(token_ids, scored.logprobs, ranks, strict=True):
        value = {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_text(tokenizer, token_id),
        }
        entry.setdefault(str(token_id), value)
    return entry


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; a part of a character shows as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def finite(logprob: float) -> float:
    """A number that JSON can hold; a model that overflows may yield none."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB
