"""DecisionWriter: writes the answers of a request, in the format of its API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.decisions.questions import Reading
from router.api.http.slices import encode
from router.api.openai.whole import WholeWriter
from router.serving import Completion, Generation

Usage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DecisionWriter(WholeWriter):
    """Writes the response once all questions have been answered."""

    generation: Generation
    """The generation, with a completion of one token per question."""
    labels: Sequence[Sequence[Sequence[int]]]
    """Token ids of each option's labels, by question and option."""
    body: Callable[[Sequence[Reading], Usage], dict[str, Any]]
    """Creates the body from the readings and the usage."""

    def whole(self) -> Iterator[bytes]:
        """JSON of the response."""
        completions = zip(self.generation.completions, self.labels, strict=True)
        readings = [reading_of(completion, labels) for completion, labels in completions]
        yield encode(self.body(readings, self._usage()))

    def _usage(self) -> Usage:
        """Token counts, summed over all completions."""
        num_input = self.generation.num_prompt_tokens
        num_output = self.generation.num_completion_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": self.generation.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }


def reading_of(completion: Completion, labels: Sequence[Sequence[int]]) -> Reading:
    """The reading of a finished completion; `labels` holds the label tokens of each option."""
    [scored] = completion.logprobs
    sampled, *token_ids = scored.token_ids
    logprobs = dict(zip(token_ids, scored.logprobs[1:], strict=True))
    return Reading.of(
        [[logprobs[token_id] for token_id in tokens] for tokens in labels],
        argmax_is_label=any(sampled in tokens for tokens in labels),
    )
