"""Configuration of canvases: blocks of tokens that a model generates from random tokens, starting
at any position, right after the known tokens (DiffusionGemma). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from worker.models.config.schema import Count, Index, Number
from worker.protocol.analyzed import analyzed

_Temperature = Annotated[float, Meta(gt=0, le=100)]


class _Sampler(msgspec.Struct):
    """`sampler_config` in generation_config.json."""

    entropy_bound: Number = 0.1


class _Generation(msgspec.Struct):
    """Keys of generation_config.json for canvases; defaults as in transformers."""

    max_denoising_steps: Annotated[int, Meta(ge=1, le=1024)] | None = None
    sampler_config: _Sampler | None = None
    t_min: _Temperature | None = None
    t_max: _Temperature | None = None
    stability_threshold: Index | None = None
    confidence_threshold: Number | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasConfig:
    """Size of a model's canvases, and how they are generated."""

    length: int
    """Number of tokens per canvas."""
    max_rounds: int = 48
    """Maximum number of rounds per canvas."""
    first_temperature: float = 0.8
    """Temperature of the first round."""
    last_temperature: float = 0.4
    """Temperature that the rounds approach linearly; it would be reached one round after
    `max_rounds`."""
    entropy_bound: float = 0.1
    """Sum of entropies, in nats, up to which a round accepts positions, starting with the most
    certain ones."""
    stable_rounds: int = 1
    """Number of preceding rounds that must have the same most likely tokens as a round for it to
    finish a canvas early."""
    max_entropy: float = 0.005
    """Mean entropy of the positions, in nats, below which a round may finish a canvas early."""

    @classmethod
    def of(cls, length: Count, generation: dict[str, Any]) -> CanvasConfig:
        """Configuration of canvases of this length, read from generation_config.json.

        Raises:
            ValueError: a value in generation_config.json is not supported; the message names it.
        """
        try:
            keys = msgspec.convert(generation, analyzed(_Generation))
        except msgspec.ValidationError as error:
            raise ValueError(
                f"invalid value in generation_config.json ({error}): fix it"
            ) from error
        given = {
            "max_rounds": keys.max_denoising_steps,
            "last_temperature": keys.t_min,
            "first_temperature": keys.t_max,
            "entropy_bound": keys.sampler_config and keys.sampler_config.entropy_bound,
            "stable_rounds": keys.stability_threshold,
            "max_entropy": keys.confidence_threshold,
        }
        named = {name: value for name, value in given.items() if value is not None}
        return cls(length=length, **named)  # type: ignore[arg-type]

    def temperature(self, index: int, max_rounds: int) -> float:
        """Temperature of a round, given its 0-based `index` and the maximum number of rounds."""
        share = (max_rounds - index) / max_rounds
        return self.last_temperature + (self.first_temperature - self.last_temperature) * share
