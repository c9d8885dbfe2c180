"""Datasets of prompts: random tokens, and prompts that share prefixes.

Flags are those of vLLM's `random` and `prefix_repetition` datasets; the sampled tokens differ.
Prompts are token IDs, so that their lengths are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DatasetName = Literal["random", "prefix_repetition"]
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetOptions:
    """Type of prompts, and lengths of prompts and completions."""

    dataset_name: DatasetName = "random"
    """Dataset: prompts of random tokens, or random prompts that share prefixes."""
    random_input_len: int = field(default=1024, metadata={"aliases": ("--input-len",)})
    """Number of prompt tokens, for the random dataset."""
    random_output_len: int = field(default=128, metadata={"aliases": ("--output-len",)})
    """Number of output tokens, for the random dataset."""
    random_range_ratio: float = 0.0
    """Range ratio of the random dataset's lengths, which are uniform in [length * (1 - ratio),
    length * (1 + ratio)]."""
    random_prefix_len: int = 0
    """Number of tokens of a common prefix of all prompts, in addition to --random-input-len."""
    prefix_repetition_prefix_len: int = 256
    """Number of tokens of each shared prefix, for the prefix_repetition dataset."""
    prefix_repetition_suffix_len: int = 256
    """Number of prompt tokens after the shared prefix, for the prefix_repetition dataset."""
    prefix_repetition_num_prefixes: int = 10
    """Number of shared prefixes, for the prefix_repetition dataset."""
    prefix_repetition_output_len: int = 128
    """Number of output tokens, for the prefix_repetition dataset."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ValueError(
                f"--random-range-ratio must be in [0, 1), got {self.random_range_ratio}"
            )
        if self.random_input_len < 1 or self.random_output_len < 1:
            raise ValueError(
                "--random-input-len and --random-output-len must be at least 1, got "
                f"{self.random_input_len} and {self.random_output_len}"
            )
        if self.random_prefix_len < 0:
            raise ValueError(
                f"--random-prefix-len must not be negative, got {self.random_prefix_len}"
            )
        if self.prefix_repetition_num_prefixes < 1 or self.prefix_repetition_output_len < 1:
            raise ValueError(
                "--prefix-repetition-num-prefixes and --prefix-repetition-output-len must be at "
                f"least 1, got {self.prefix_repetition_num_prefixes} and "
                f"{self.prefix_repetition_output_len}"
            )
        if self.prefix_repetition_prefix_len + self.prefix_repetition_suffix_len < 1:
            raise ValueError(
                "--prefix-repetition-prefix-len plus --prefix-repetition-suffix-len must be at "
                f"least 1, got {self.prefix_repetition_prefix_len} + "
                f"{self.prefix_repetition_suffix_len}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One request of a dataset."""

    prompt_token_ids: list[int]
    output_len: int


def make_samples(options: DatasetOptions, count: int, vocabulary: Ids, seed: int) -> list[Sample]:
    """`count` samples with tokens from `vocabulary`; equal seeds give equal samples."""
    rng = np.random.default_rng(seed)
    if options.dataset_name == "random":
        return _random(options, count, vocabulary, rng)
    return _prefix_repetition(options, count, vocabulary, rng)


def _random(
    options: DatasetOptions, count: int, vocabulary: Ids, rng: np.random.Generator
) -> list[Sample]:
    prefix = rng.choice(vocabulary, options.random_prefix_len).tolist()
    inputs = _lengths(options.random_input_len, options.random_range_ratio, count, rng)
    outputs = _lengths(options.random_output_len, options.random_range_ratio, count, rng)
    return [
        Sample(
            prompt_token_ids=prefix + rng.choice(vocabulary, input_len).tolist(),
            output_len=output_len,
        )
        for input_len, output_len in zip(inputs, outputs, strict=True)
    ]


def _prefix_repetition(
    options: DatasetOptions, count: int, vocabulary: Ids, rng: np.random.Generator
) -> list[Sample]:
    prefixes = [
        rng.choice(vocabulary, options.prefix_repetition_prefix_len).tolist()
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    order = rng.permutation(np.arange(count) % len(prefixes))
    return [
        Sample(
            prompt_token_ids=prefixes[index]
            + rng.choice(vocabulary, options.prefix_repetition_suffix_len).tolist(),
            output_len=options.prefix_repetition_output_len,
        )
        for index in order.tolist()
    ]


def _lengths(mean: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    low = max(1, int(mean * (1.0 - ratio)))
    high = int(mean * (1.0 + ratio))
    lengths: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return lengths
