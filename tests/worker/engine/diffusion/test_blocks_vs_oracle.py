"""Tokens and rounds per block equal those of an oracle without a cache, in all modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.checkpoints.sdar import EOS, MASK, VOCAB_SIZE, SdarCheckpoint, write_sdar
from tests.support.effort import IS_LONG
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.block_oracle import Answer, Terms, answer
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.sampling import SamplingParams

ALGORITHMS = {
    "LowConfidence": Terms(threshold=0.3),
    "JointThreshold": Terms(
        algorithm="JointThreshold",
        threshold=0.25,
        edit_threshold=0.3,
        max_post_edit_steps=3,
        penalty=1.5,
    ),
    "LowConfidenceStatic": Terms(algorithm="LowConfidenceStatic", steps=3),
    "Sequential": Terms(algorithm="Sequential", steps=3),
    "EntropyBounded": Terms(algorithm="EntropyBounded", entropy_bound=5.0),
}


SHORT = ((4, "LowConfidence"), (8, "JointThreshold"), (4, "EntropyBounded"))
"""Block sizes and algorithms that `make test` combines; the others only run in `make
check-long`."""


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SdarCheckpoint:
    torch.set_num_threads(1)
    return write_sdar(tmp_path_factory.mktemp(f"sdar-{request.param}"), request.param)


def params_of(terms: Terms, **options: object) -> SamplingParams:
    diffusion = DiffusionParams(
        algorithm=terms.algorithm,  # type: ignore[arg-type]  # names of the table above
        threshold=terms.threshold,
        steps=terms.steps,
        entropy_bound=terms.entropy_bound,
        edit_threshold=terms.edit_threshold,
        max_post_edit_steps=terms.max_post_edit_steps,
        penalty=terms.penalty,
    )
    return SamplingParams(temperature=0.0, diffusion=diffusion, **options)  # type: ignore[arg-type]


def prompts_of(block_size: int) -> list[list[int]]:
    """Prompts of every length modulo the block size (every fifth of the largest in `make test`),
    with mask tokens in every other one."""
    rng = np.random.default_rng(block_size)
    step = 1 if IS_LONG or block_size <= 8 else 5
    lengths = [1, *range(block_size, 2 * block_size, step), 5 * block_size + 3]
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
    for prompt in prompts[1::2]:
        prompt[-1] = prompt[0] = MASK
    return prompts


def max_tokens_of(length: int, block_size: int) -> int:
    """Almost three blocks; for large ones mostly only the one that contains the prompt's tail."""
    only_first = block_size > 8 and length % 8
    return block_size - length % block_size if only_first else 3 * block_size - 2


def oracles(checkpoint: SdarCheckpoint, terms: Terms) -> list[Answer]:
    size = checkpoint.block_size
    return [
        answer(
            checkpoint.logits,
            prompt,
            block_size=size,
            mask=MASK,
            max_tokens=max_tokens_of(len(prompt), size),
            terms=terms,
            ends=EOS,
        )
        for prompt in prompts_of(size)
    ]


@pytest.mark.checks(
    "blocks", "batched", of="SDARForCausalLM", against="independent reference and uncached decoding"
)
@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        pytest.param(size, name, marks=() if (size, name) in SHORT else pytest.mark.long)
        for size in (4, 8, 32)
        for name in ALGORITHMS
    ],
    indirect=["checkpoint"],
)
def test_tokens_and_rounds(checkpoint: SdarCheckpoint, name: str) -> None:
    terms, size = ALGORITHMS[name], checkpoint.block_size
    expected = oracles(checkpoint, terms)
    margin = min(one.margin for one in expected)
    assert margin > 1e-5, f"a confidence is {margin} from its threshold: choose another seed"
    prompts = prompts_of(size)
    sampling = [params_of(terms, max_tokens=max_tokens_of(len(one), size)) for one in prompts]
    page = max(16, size)
    for options in (
        {},
        {"cpu_backend": "torch"},
        {"cpu_backend": "torch", "batch_invariant": True, "dllm_fdfo": False},
        {"dllm_disable": ("fused_commit", "skip_last_commit", "mixed_rounds")},
    ):
        disable = (*options.pop("dllm_disable", ()), "early_exit")
        with BlockEngine(
            checkpoint.folder,
            page_size=page,
            max_num_seqs=5,
            max_num_batched_tokens=4 * size,
            dllm_disable=disable,
            **options,
        ) as engine:
            outputs = engine.serve(prompts, sampling)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        assert [one.rounds for one in outputs] == [one.rounds for one in expected]
