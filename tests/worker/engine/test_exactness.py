"""Tokens equal transformers', with any batches, chunks, pages and ranks.

Without --batch-invariant a token may only differ if the best two logits are nearly tied. With it,
greedy and seeded outputs are bitwise equal in all settings with the same tensor-parallel size. All
but "alone" run at overlap depth 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.effort import IS_LONG
from tests.support.engines.exactness import (
    ARCHITECTURES,
    EVERY,
    GREEDY,
    Checkpoint,
    Settings,
    assert_greedy_of_transformers,
    make_prompts,
    seeded_params,
)

pytestmark = pytest.mark.randomized  # with more tokens
NUM_GREEDY = 20 if IS_LONG else 10
ALONE = EVERY if IS_LONG else slice(1, None, 2)
"""Prompts that are also run alone, including every filter and the longest prompt."""
FULL = "qwen3"
"""Model whose bits are compared in `make test`; others in `make check-long`. Tokens of every family
are compared with transformers' in tests/worker/models/test_families.py."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, Path(folder))
    return Checkpoint(request.param, str(folder), model)


def long_but(short: object, values: Iterable[object]) -> list[ParameterSet]:
    """All values; `make test` runs one of them."""
    return [pytest.param(one, marks=() if one == short else pytest.mark.long) for one in values]


@pytest.mark.parametrize("checkpoint", [FULL], indirect=True)
@pytest.mark.parametrize("setting", ["batched", "alone", "chunked", "scarce", "tensor_parallel"])
def test_greedy_equals_transformers(checkpoint: Checkpoint, setting: str) -> None:
    settings = Settings(checkpoint.folder, [GREEDY] * NUM_GREEDY)
    if setting == "batched":
        results = list(settings.batched_then_cached())
    else:
        results = [getattr(settings, setting)()]
    for outputs in results:
        assert_greedy_of_transformers(checkpoint.model, make_prompts(NUM_GREEDY), outputs)


@pytest.mark.parametrize("num_prompts", long_but(10, (10, 20)))
@pytest.mark.parametrize("checkpoint", long_but(FULL, ARCHITECTURES), indirect=True)
def test_batch_invariant_outputs_are_bitwise_equal(
    checkpoint: Checkpoint, num_prompts: int
) -> None:
    assert_bitwise_equal(checkpoint, "native", num_prompts)


@pytest.mark.long
@pytest.mark.parametrize("num_prompts", [10, 20])
@pytest.mark.parametrize("checkpoint", ["llama", FULL], indirect=True)
def test_so_they_are_without_the_compiled_library(checkpoint: Checkpoint, num_prompts: int) -> None:
    """These two have all features of layers: biases, scaled rotary embedding, norms of heads. In
    `make test`, models with windows, which the compiled library does not support, run without it
    (test_window_exactness.py)."""
    assert_bitwise_equal(checkpoint, "torch", num_prompts)


def assert_bitwise_equal(checkpoint: Checkpoint, cpu_backend: str, num_prompts: int) -> None:
    settings = Settings(
        checkpoint.folder,
        seeded_params()[:num_prompts],
        batch_invariant=True,
        cpu_backend=cpu_backend,
    )
    batched, cached = settings.batched_then_cached()
    assert batched[ALONE] == settings.alone(ALONE)
    assert cached == batched
    assert settings.chunked() == batched
    assert settings.scarce() == batched
    together, alone_parallel = settings.tensor_parallel_and_alone()
    assert together == alone_parallel
