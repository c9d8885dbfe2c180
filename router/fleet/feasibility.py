"""Whether a request can run at all, asked before anything is booked for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cachetools import LRUCache

from router.fleet.blocks import PromptBlocks
from worker.wire.limits import (
    Limits,
    Problem,
    prompt_problem,
    room_problem,
    sampling_problem,
    token_problem,
)
from worker.wire.sampling import SamplingParams
from worker.wire.structured import StructuredOutputsParams

_MAX_GRAMMARS = 1024
"""Messages have 1 KiB at most (worker.core.grammar.base), so all of them 1 MiB."""


class Feasibility:
    """Holds a request against the limits of workers, of which there is one kind as a rule.

    Parameters are looked through once per kind, however many completions they are for.

    Args:
        sampling: what all completions of the request are asked for.
        names: the client's names of fields that are called otherwise here.
    """

    __slots__ = ("_known", "_names", "sampling")

    def __init__(self, sampling: SamplingParams, names: Mapping[str, str]) -> None:
        self.sampling = sampling
        self._names = names
        self._known: dict[Limits, Problem | None] = {}

    def amended(self, **changes: object) -> Feasibility:
        """The same for sampling parameters with other values, on which no limit depends."""
        return Feasibility(self.sampling.amended(**changes), self._names)

    def param(self, field: str) -> str | None:
        """The client's name of a field; None for no field."""
        return self._names.get(field, field) or None

    def parameters(self, kinds: Collection[Limits]) -> Problem | None:
        """Why none of these kinds of worker can do it, whatever the prompt; None where one can."""
        return self._of_all([self._parameters(kind) for kind in kinds])

    def prompt(self, kinds: Collection[Limits], num_tokens: int) -> Problem | None:
        """Why none of these kinds can do it for a prompt of so many tokens; None where one can."""
        return self._of_all([self._length(kind, num_tokens) for kind in kinds])

    def characters(
        self, kinds: Collection[Limits], num_characters: int, longest_token: int
    ) -> Problem | None:
        """Why no kind can do it for a text, before there are tokens, each `longest_token` at most.

        Texts that cannot fit are found by this alone: a tokenizer would take seconds for them.
        """
        most = max((kind.max_tokens - 1 for kind in kinds), default=None)
        if most is None or num_characters <= most * longest_token:
            return None
        message = (
            f"the prompt has {num_characters} characters, but this model takes at most {most} "
            f"tokens, of {longest_token} characters at most: shorten the prompt"
        )
        return self._of_all([Problem("prompt", message)])

    def at(self, kind: Limits, prompt: PromptBlocks, num_resumed: int) -> Problem | None:
        """Why no worker of this kind can continue after `prompt`; None where one can.

        Args:
            kind: of worker.
            prompt: with the tokens so far at its end.
            num_resumed: how many these are.
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


class RefusedGrammars:
    """Grammars that workers have refused for good, until a worker joins that may know better.

    Whoever sends such a grammar again gets the message before anything is booked, and costs no
    worker anything. Grammars are kept by their hashes: their texts may be large.
    """

    def __init__(self) -> None:
        self._messages: LRUCache[int, str] = LRUCache(_MAX_GRAMMARS)

    def add(self, params: StructuredOutputsParams, message: str) -> None:
        """A worker refuses a grammar with this message, and would refuse it again."""
        self._messages[hash(params)] = message

    def find(self, params: StructuredOutputsParams | None) -> str | None:
        """Why a grammar was refused; None where nothing is known against it."""
        if params is None or not self._messages:
            return None
        return self._messages.get(hash(params))

    def clear(self) -> None:
        """A worker has come, perhaps with another backend or vocabulary."""
        self._messages.clear()
