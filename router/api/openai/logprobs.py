"""Log-probabilities in responses: OpenAI's two formats, and vLLM's prompt_logprobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from router.api.http.slices import Rows, SharedItems
from worker.protocol.messages import TokenLogprobs
from worker.protocol.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Minimum log-probability in responses; replaces minus infinity, which JSON cannot represent."""

Scored = tuple[int, TokenLogprobs | None]
"""A token id and its log-probabilities, which are None for the first prompt token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoedPrompt:
    """The `logprobs` of an echoed prompt, shared by all of its choices."""

    columns: Mapping[str, SharedItems]
    """Encoded arrays of `logprobs`, by field name."""


class LogprobFormat(ABC):
    """Writes the `logprobs` of one response.

    Args:
        tokenizer: tokenizer of the model, for the texts of tokens.
        num_top: number of top tokens to return per token.
        by_id: whether tokens are written as `token_id:ID`, since different tokens may have the
            same text.
    """

    has_offsets: bool
    """Whether text offsets are written."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._by_id = by_id

    def entries(
        self, tokens: Sequence[Scored], offsets: Iterable[int], echoed: EchoedPrompt | None = None
    ) -> dict[str, Any]:
        """`logprobs` for new tokens of a choice.

        Args:
            tokens: new tokens of the choice.
            offsets: index in the choice's text where each token's text starts; only used if
                `has_offsets`.
            echoed: the prompt, if it is echoed before these tokens; otherwise None.
        """
        columns = self._columns(tokens, offsets)
        first = {} if echoed is None else echoed.columns
        return {name: Rows(items, first.get(name)) for name, items in columns.items()}

    def echoed(self, tokens: Sequence[Scored], offsets: Iterable[int]) -> EchoedPrompt:
        """Log-probabilities of a prompt for `entries`, encoded once for all of its choices.

        Takes 70 ms for 4,096 tokens with 20 log-probabilities each.
        """
        columns = self._columns(tokens, offsets)
        return EchoedPrompt(columns={name: SharedItems(items) for name, items in columns.items()})

    @abstractmethod
    def _columns(
        self, tokens: Sequence[Scored], offsets: Iterable[int]
    ) -> dict[str, Iterable[Any]]:
        """The arrays of `logprobs` by field name.

        Args:
            offsets: text offset of each token.
        """

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else token_text(self._tokenizer, token_id)


class ChatLogprobs(LogprobFormat):
    """`logprobs` of chats: a list with an object per token."""

    has_offsets = False

    def _columns(
        self, tokens: Sequence[Scored], offsets: Iterable[int]
    ) -> dict[str, Iterable[Any]]:
        return {"content": (self.entry(found) for _, found in tokens if found is not None)}

    def entry(self, found: TokenLogprobs) -> dict[str, Any]:
        """The object of one token, including the top tokens at its position."""
        sampled, *others = [
            self._token(token_id, logprob)
            for token_id, logprob in zip(found.token_ids, found.logprobs, strict=True)
        ]
        return {**sampled, "top_logprobs": others[: self._num_top]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._name(token_id) if self._by_id else data.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }


class TextLogprobs(LogprobFormat):
    """`logprobs` of /v1/completions: four parallel arrays."""

    has_offsets = True

    def _columns(
        self, tokens: Sequence[Scored], offsets: Iterable[int]
    ) -> dict[str, Iterable[Any]]:
        return {
            "tokens": (self._name(token_id) for token_id, _ in tokens),
            "token_logprobs": (
                None if found is None else finite(found.logprobs[0]) for _, found in tokens
            ),
            "top_logprobs": (None if found is None else self._top(found) for _, found in tokens),
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by token: the top tokens and the token itself."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(found.token_ids, found.logprobs, strict=True):
            top.setdefault(self._name(token_id), finite(logprob))
        return top


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs] | None) -> Rows | None:
    """vLLM's `prompt_logprobs`: for each prompt token an object by token id, null for the first.

    The result may be part of several choices and is encoded once.
    """
    if found is None:
        return None
    entries = (_prompt_entry(tokenizer, scored) for scored in found)
    return Rows((), SharedItems(chain((None,), entries)))


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
    """The text of a single token; incomplete UTF-8 becomes U+FFFD."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def finite(logprob: float) -> float:
    """The number, or LEAST_LOGPROB for -inf and NaN, which JSON cannot represent."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB
