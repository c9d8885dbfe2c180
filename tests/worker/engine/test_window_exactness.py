"""Models with sliding windows generate transformers' tokens with any batches, chunks, prefix hits,
pages and ranks; their pages are freed meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.exactness import (
    GREEDY,
    Settings,
    assert_greedy_of_transformers,
    make_prompts,
    seeded_params,
)
from worker.rank.runner import ModelRunner

pytestmark = pytest.mark.randomized  # with more tokens
NUM_PROMPTS = 16
FEWER = 16 if IS_LONG else 9
"""Number of prompts if pages need not be scarce."""
NUMBERS = {"scarce": NUM_PROMPTS, "alone": 16 if IS_LONG else 4}
OTHERS = ("mistral-windows", "qwen2-window")
NAME = "qwen3-windows"
"""Other families with windows are tested in tests/worker/models/test_families.py."""
SCARCE_TOKENS = 336


class WindowSettings(Settings):
    """Chunks longer than windows, and pages that are scarce although windows free them."""

    def __init__(self, folder: str, **options: object) -> None:
        params = options.pop("params", [GREEDY] * NUM_PROMPTS)
        super().__init__(folder, params, **options)  # type: ignore[arg-type]  # test options
        self._scarce = {
            "kv_cache_tokens": SCARCE_TOKENS,
            "max_num_batched_tokens": 64,
        }

    def scarce(self) -> list[Outcome]:
        with self._engine(**self._scarce) as engine:
            outputs = engine.outcomes(self._prompts, self._params)
            assert engine.num_preemptions > 0, "pages were not scarce"
            return outputs

    def tensor_parallel(self) -> list[Outcome]:
        with self._engine(tensor_parallel_size=2, **self._scarce) as engine:
            return engine.outcomes(self._prompts, self._params)

    def speculative(self) -> list[Outcome]:
        with self._engine(speculative_method="ngram", speculative_adaptive=False) as engine:
            return engine.outcomes(self._prompts, self._params)

    def drafted(self, model: str) -> list[Outcome]:
        """With a draft model, scarce pages and prefix hits."""
        options = {"speculative_method": "draft", "speculative_model": model}
        with self._engine(**options, speculative_adaptive=False, **self._scarce) as engine:
            outputs = engine.outcomes(self._prompts, self._params)
            gate = engine.core.scheduler.steps.speculation
            assert gate is not None
            assert gate.totals.num_accepted_tokens > 20, "no draft was right: nothing was tried"
            assert engine.outcomes(self._prompts, self._params) == outputs
            return outputs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(NAME)
    return str(folder), write_checkpoint(NAME, Path(folder))


@pytest.mark.checks("drafts", of=NAME, against="transformers")
@pytest.mark.parametrize(
    "setting", ["batched", "alone", "chunked", "scarce", "tensor_parallel", "speculative"]
)
def test_greedy_equals_transformers(checkpoint: tuple[str, PreTrainedModel], setting: str) -> None:
    folder, model = checkpoint
    number = NUMBERS.get(setting, FEWER)
    settings = WindowSettings(folder, params=[GREEDY] * number)
    if setting == "batched":
        results = list(settings.batched_then_cached())
    else:
        results = [getattr(settings, setting)()]
    for outputs in results:
        assert_greedy_of_transformers(model, make_prompts(number), outputs)


def test_a_draft_model_changes_no_token(
    checkpoint: tuple[str, PreTrainedModel], tmp_path: Path
) -> None:
    """The same weights without windows draft; within the windows they are right."""
    folder, model = checkpoint
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outputs = WindowSettings(folder, params=[GREEDY] * FEWER).drafted(str(tmp_path))
    assert_greedy_of_transformers(model, make_prompts(FEWER), outputs)


@pytest.mark.long
@pytest.mark.checks("drafts", of=OTHERS, against="transformers")
@pytest.mark.parametrize("name", OTHERS)
def test_drafts_of_models_with_other_windows(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write_checkpoint(name, tmp_path)
    outputs = WindowSettings(str(tmp_path)).speculative()
    assert_greedy_of_transformers(model, make_prompts(NUM_PROMPTS), outputs)


def test_batch_invariant_outputs_are_bitwise_equal(
    checkpoint: tuple[str, PreTrainedModel],
) -> None:
    folder, _ = checkpoint
    settings = WindowSettings(folder, params=seeded_params()[:8], batch_invariant=True)
    batched, cached = settings.batched_then_cached()
    assert cached == batched
    assert settings.chunked() == batched


def test_what_needs_all_pages_is_refused_before_weights_are_read(
    checkpoint: tuple[str, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = checkpoint

    def load_nothing(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("worker.rank.loaded_model.load_weights", load_nothing)
    refusal = "--cpu-backend native is not supported.*--max-model-len 33"
    with pytest.raises(ValueError, match=refusal):
        Engine(folder, cpu_backend="native")


def test_a_length_within_the_window_needs_none_of_this(
    checkpoint: tuple[str, PreTrainedModel],
) -> None:
    folder, model = checkpoint
    with Engine(folder, max_model_len=33, kv_cache_tokens=1024, host_cache_gib=0.01) as engine:
        runner = engine._executor._rank.runner
        assert isinstance(runner, ModelRunner)
        assert runner.model.native is not None
        (tokens,) = engine.generate([[5, 6, 7]], GREEDY)
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, *tokens]])).logits[0, 2:-1]
    assert tokens == logits.argmax(-1).tolist()
