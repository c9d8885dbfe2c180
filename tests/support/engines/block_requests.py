"""Requests for block-diffusion engines: algorithms and filters."""

from __future__ import annotations

from typing import get_args

import numpy as np

from tests.support.checkpoints.sdar import VOCAB_SIZE
from tests.support.effort import IS_LONG
from worker.protocol.diffusion import DiffusionParams, DllmAlgorithm
from worker.protocol.sampling import SamplingParams

COUNT = 16 if IS_LONG else 8
"""Number of requests; enough to use every filter with an algorithm that edits and with one that
does not."""


def prompts(count: int = COUNT) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 60))).tolist() for _ in range(count)]


def sampling(count: int = COUNT, **options: object) -> list[SamplingParams]:
    """Sampling parameters of an algorithm that edits and one that does not, greedy and sampled,
    with every filter."""
    draws = [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 9}, {"top_p": 0.7}]
    return [
        SamplingParams(
            seed=index,
            max_tokens=29,
            ignore_eos=True,
            diffusion=DiffusionParams(
                algorithm=("LowConfidence", "JointThreshold")[index % 2],
                threshold=(0.3, 0.5)[index % 2],
                edit_threshold=0.6,
                max_post_edit_steps=2,
            ),
            **{**draws[index % 3], **options},  # type: ignore[arg-type]  # fields by name
        )
        for index in range(count)
    ]


def of_each_algorithm() -> list[SamplingParams]:
    """One request per algorithm, with random sampling."""
    return [
        SamplingParams(
            temperature=0.8,
            seed=index,
            max_tokens=13,
            ignore_eos=True,
            diffusion=DiffusionParams(algorithm=algorithm, threshold=0.3, steps=3),
        )
        for index, algorithm in enumerate(get_args(DllmAlgorithm))
    ]
