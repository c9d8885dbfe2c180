"""Questions with labeled options, as the model reads them, and the probabilities of the labels."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LETTERS = tuple(string.ascii_uppercase)


class Option(NamedTuple):
    """An option as the model reads it."""

    name: str
    """Name; empty if the label is enough."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is one of several labels."""

    instructions: str
    options: Sequence[Option]
    labels: Sequence[str] = LETTERS
    """Labels of the options; the first ones are used if there are fewer options than labels."""
    aliases: Sequence[str] = ()
    """Other spellings of the labels, in the same order; a spelling that is a single token counts as
    its label. Empty if there are none."""
    reply: str = "the letter of one option"
    """Form of the reply, as described to the model."""

    @property
    def used_labels(self) -> Sequence[str]:
        """The labels in use, one per option."""
        return self.labels[: len(self.options)]

    def after(self, state: str) -> str:
        """The user's message: the state, followed by the question.

        All messages of a request begin with the same state.
        """
        lines = [f"{state}\n"]
        if self.instructions:
            lines.append(f"Question: {self.instructions}")
        for label, option in zip(self.used_labels, self.options, strict=True):
            text = " - ".join(filter(None, option))
            if text:
                lines.append(f"{label}: {text}")
        lines.append(f"Reply with {self.reply} and nothing else.")
        return "\n".join(lines)


class Reading(NamedTuple):
    """The probabilities of a question's options."""

    probabilities: list[float]
    """Probability of each option, given that the reply is a label."""
    label_mass: float
    """Probability that the reply starts with a label."""
    argmax_is_label: bool
    """Whether the most likely token is a label."""

    @property
    def best(self) -> int:
        """Index of the most likely option."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def confidence(self) -> float:
        """Probability that the reply is the most likely option."""
        return max(self.probabilities) * self.label_mass

    @property
    def mean(self) -> float:
        """Mean option index, weighted by probability."""
        return math.fsum(index * value for index, value in enumerate(self.probabilities))

    @staticmethod
    def of(logprobs: Sequence[Sequence[float]], *, argmax_is_label: bool) -> Reading:
        """Computes a reading from the log-probabilities of each option's labels."""
        largest = max(value for values in logprobs for value in values)
        if largest == -math.inf:
            largest = 0.0  # no label is possible
        weights = [math.fsum(math.exp(one - largest) for one in values) for values in logprobs]
        total = math.fsum(weights)
        return Reading(
            [weight / total if total else 1.0 / len(weights) for weight in weights],
            math.fsum(math.exp(one) for values in logprobs for one in values),
            argmax_is_label,
        )
