"""Tokens are transformers' tokens, whatever the engine does with batches, chunks, pages, ranks.

Without --batch-invariant a token may differ only where the best two logits nearly tie. With it,
greedy and seeded outputs are bitwise the same in every setting at equal tensor-parallel size.
All but "alone" run at overlap depth 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import PreTrainedModel

from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.engine_driver import Engine
from worker.wire.sampling import SamplingParams

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
FULL = "qwen3"
"""Goes through all settings in `make test`; of the others that is left to `make check-long`."""
NEAR_TIE = 1e-4
NUM_NEW = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
SCARCE_TOKENS = 960
"""KV cache in which the longest prompt fits, and the working set of 20 does not."""


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: str
    model: PreTrainedModel


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, Path(folder))
    return Checkpoint(request.param, str(folder), model)


def make_prompts(number: int = 20) -> list[list[int]]:
    """Prompts of 3 to 700 tokens."""
    rng = np.random.default_rng(11)
    lengths = np.geomspace(3, 700, number).astype(int)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def seeded_params() -> list[SamplingParams]:
    """Greedy and sampled requests in turn, every filter used."""
    sampled = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.05},
    ]
    return [
        SamplingParams(seed=100 + i, max_tokens=NUM_NEW, ignore_eos=True, **sampled[i % 5])
        for i in range(20)
    ]


class Settings:
    """The same prompts through differently set engines."""

    def __init__(self, folder: str, params: list[SamplingParams], **options: object) -> None:
        self._folder = folder
        self._params = params
        self._options = options
        self._prompts = make_prompts(len(params))

    def alone(self) -> list[list[int]]:
        with self._engine(enable_prefix_caching=False, overlap_depth=0) as engine:
            pairs = zip(self._prompts, self._params, strict=True)
            return [engine.generate([prompt], [one])[0] for prompt, one in pairs]

    def batched_then_cached(self) -> tuple[list[list[int]], list[list[int]]]:
        with self._engine() as engine:
            batched = engine.generate(self._prompts, self._params)
            return batched, engine.generate(self._prompts, self._params)

    def chunked(self) -> list[list[int]]:
        with self._engine(max_num_batched_tokens=32) as engine:
            return engine.generate(self._prompts, self._params)

    def scarce(self) -> list[list[int]]:
        with self._engine(kv_cache_tokens=SCARCE_TOKENS) as engine:
            outputs = engine.generate(self._prompts, self._params)
            assert engine.num_preemptions > 0, "pages were not scarce"
            return outputs

    def tensor_parallel(self) -> list[list[int]]:
        """TP 2: scarce pages with chunks."""
        with self._parallel_engine() as engine:
            return engine.generate(self._prompts, self._params)

    def tensor_parallel_and_alone(self) -> tuple[list[list[int]], list[list[int]]]:
        """TP 2: scarce pages with chunks, then alone."""
        with self._parallel_engine() as engine:
            together = engine.generate(self._prompts, self._params)
            pairs = zip(self._prompts, self._params, strict=True)
            return together, [engine.generate([prompt], [one])[0] for prompt, one in pairs]

    def _parallel_engine(self) -> Engine:
        return self._engine(
            tensor_parallel_size=2, kv_cache_tokens=SCARCE_TOKENS, max_num_batched_tokens=256
        )

    def _engine(self, **options: object) -> Engine:
        return Engine(self._folder, **{"kv_cache_tokens": 16384, **self._options, **options})


def assert_greedy_of_transformers(
    model: PreTrainedModel, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Every token is the reference's best after the same tokens, near ties aside."""
    near_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_NEW
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        for token, row, gap in zip(output, logits, best - second, strict=True):
            if token != row.argmax():
                assert gap < NEAR_TIE
                near_ties += 1
    assert near_ties <= 1


def long_but(short: object, values: Iterable[object]) -> list[ParameterSet]:
    """All values; `make test` runs one of them."""
    return [pytest.param(one, marks=() if one == short else pytest.mark.long) for one in values]


def cases(*settings: str) -> list[ParameterSet]:
    """Architectures with settings; `make test` runs all with the first of these."""
    return [
        pytest.param(
            *(name, setting),
            marks=() if name == FULL or setting == settings[0] else pytest.mark.long,
        )
        for name in ARCHITECTURES
        for setting in settings
    ]


@pytest.mark.parametrize(
    ("checkpoint", "setting"),
    cases("batched", "alone", "chunked", "scarce", "tensor_parallel"),
    indirect=["checkpoint"],
)
def test_greedy_equals_transformers(checkpoint: Checkpoint, setting: str) -> None:
    settings = Settings(checkpoint.folder, [GREEDY] * 20)
    if setting == "batched":
        results = list(settings.batched_then_cached())
    else:
        results = [getattr(settings, setting)()]
    for outputs in results:
        assert_greedy_of_transformers(checkpoint.model, make_prompts(), outputs)


@pytest.mark.parametrize("checkpoint", long_but(FULL, ARCHITECTURES), indirect=True)
def test_batch_invariant_outputs_are_bitwise_equal(checkpoint: Checkpoint) -> None:
    assert_bitwise_equal(checkpoint, "native")


@pytest.mark.parametrize("num_prompts", long_but(10, (10, 20)))
@pytest.mark.parametrize("checkpoint", long_but(FULL, ("llama", FULL)), indirect=True)
def test_so_they_are_without_the_compiled_library(checkpoint: Checkpoint, num_prompts: int) -> None:
    """These two have all that a layer may have: biases, scaled rotary embedding, norms of heads."""
    assert_bitwise_equal(checkpoint, "torch", num_prompts)


def assert_bitwise_equal(checkpoint: Checkpoint, cpu_backend: str, num_prompts: int = 20) -> None:
    settings = Settings(
        checkpoint.folder,
        seeded_params()[:num_prompts],
        batch_invariant=True,
        cpu_backend=cpu_backend,
    )
    alone = settings.alone()
    batched, cached = settings.batched_then_cached()
    assert batched == alone
    assert cached == alone
    assert settings.chunked() == alone
    assert settings.scarce() == alone
    together, alone_parallel = settings.tensor_parallel_and_alone()
    assert together == alone_parallel
