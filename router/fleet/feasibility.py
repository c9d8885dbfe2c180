"""Feasibility: checks that some worker can run a request before capacity is reserved for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cachetools import LRUCache

from router.fleet.blocks import PromptBlocks
from worker.protocol.limits import (
    Limits,
    Problem,
    prompt_problem,
    room_problem,
    sampling_problem,
    token_problem,
    too_long,
)
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

_MAX_GRAMMARS = 1024
"""Maximum number of rejected grammars kept: 1 MiB at 1 KiB per message
(worker.core.grammar.base)."""


class Feasibility:
    """Checks a request against the limits of workers, which are usually all of the same kind.

    Sampling parameters are checked once per kind of worker, not for each completion.

    Args:
        sampling: sampling parameters of all completions of the request.
        names: the client's field names where they differ from those of SamplingParams.
    """

    __slots__ = ("_known", "_names", "sampling")

    def __init__(self, sampling: SamplingParams, names: Mapping[str, str]) -> None:
        self.sampling = sampling
        self._names = names
        self._known: dict[Limits, Problem | None] = {}

    def amended(self, **changes: object) -> Feasibility:
        """A copy with some sampling parameters changed."""
        return Feasibility(self.sampling.amended(**changes), self._names)

    def param(self, field: str) -> str | None:
        """The client's name of a field; None for the empty name."""
        return self._names.get(field, field) or None

    def parameters(self, kinds: Collection[Limits]) -> Problem | None:
        """Reason why no kind of worker supports the sampling parameters, whatever the prompt; None
        if one does."""
        return self._of_all([self._parameters(kind) for kind in kinds])

    def prompt(self, kinds: Collection[Limits], num_tokens: int) -> Problem | None:
        """Reason why no kind of worker accepts a prompt of `num_tokens`; None if one does."""
        return self._of_all([self._length(kind, num_tokens) for kind in kinds])

    def characters(
        self, kinds: Collection[Limits], num_characters: int, longest_token: int
    ) -> Problem | None:
        """Reason why no kind of worker accepts a text of `num_characters`; None if one may.

        The text is not tokenized yet, which would be slow for texts far beyond the limit. A token
        has up to `longest_token` characters.
        """
        longest = max(kinds, key=lambda kind: kind.max_prompt_tokens, default=None)
        if longest is None or num_characters <= longest.max_prompt_tokens * longest_token:
            return None
        num_tokens = -(-num_characters // longest_token)
        found = f"your prompt has {num_characters} characters, at least {num_tokens} tokens"
        return self._of_all([too_long(found, num_tokens, longest.max_tokens, longest)])

    def at(self, kind: Limits, prompt: PromptBlocks, num_resumed: int) -> Problem | None:
        """Reason why workers of this kind cannot resume a completion; None if they can.

        Args:
            kind: limits of the worker.
            prompt: the prompt, followed by the completion's tokens so far.
            num_resumed: number of the completion's tokens so far.
        """
        problem = (
            self._parameters(kind)
            or self._length(kind, prompt.num_tokens, num_resumed)
            or token_problem(kind, prompt.largest_token)
        )
        return self._of_all([problem])

    def _parameters(self, kind: Limits) -> Problem | None:
        if kind not in self._known:
            self._known[kind] = sampling_problem(kind, self.sampling)
        return self._known[kind]

    def _length(self, kind: Limits, num_tokens: int, num_resumed: int = 0) -> Problem | None:
        return prompt_problem(kind, num_tokens) or room_problem(
            kind, self.sampling, num_tokens - num_resumed
        )

    def _of_all(self, problems: list[Problem | None]) -> Problem | None:
        found = [problem for problem in problems if problem is not None]
        if not found or len(found) < len(problems):
            return None
        first = found[0]
        return first._replace(param=self._names.get(first.param, first.param))


class RejectedGrammars:
    """Grammars that a worker could not compile, with its messages; cleared when a worker joins.

    A request with such a grammar is rejected before anything is reserved. Grammars are identified
    by their hashes, since their texts may be large.
    """

    def __init__(self) -> None:
        self._messages: LRUCache[int, str] = LRUCache(_MAX_GRAMMARS)

    def add(self, params: StructuredOutputsParams, message: str) -> None:
        """Records that a worker has permanently rejected a grammar with this message."""
        self._messages[hash(params)] = message

    def find(self, params: StructuredOutputsParams | None) -> str | None:
        """The message with which a grammar was rejected; None if it was not."""
        if params is None or not self._messages:
            return None
        return self._messages.get(hash(params))

    def clear(self) -> None:
        """Removes all grammars after a worker has joined, which may have another grammar backend
        or vocabulary."""
        self._messages.clear()
