"""Vectors of pooling models equal transformers' with any batch, chunks, prefix hit and ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3ForSequenceClassification

from tests.support.checkpoints.adapters import merge_adapter, write_adapter
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.adapter_engine import adapter_of, engine_with
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.family_checks import make_prompts
from worker.models.config.model_config import load_model_config
from worker.protocol.pooling import PoolingOptions, PoolingParams
from worker.protocol.sampling import SamplingParams

OPTIONS: dict[str, Any] = {
    "page_size": 16,
    "max_num_batched_tokens": 32,
    "kv_cache_tokens": 2048,
}
PROMPTS = make_prompts((1, 29, 62, 110))
Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """An embedding model saved without LM head, and the hidden states of the prompts."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("embedder")
    model = write_checkpoint("qwen3", folder).model
    model.save_pretrained(folder)
    with torch.inference_mode():
        return folder, [model(torch.tensor([p])).last_hidden_state[0] for p in PROMPTS]


def run(
    engine: Engine, params: PoolingParams | None = None, prompts: Sequence[list[int]] = PROMPTS
) -> list[Outcome]:
    found = engine.outcomes(prompts, SamplingParams(pooling=params or PoolingParams()))
    assert all(one.finish_reason == "stop" and not one.token_ids for one in found)
    return found


def vectors(outcomes: Sequence[Outcome]) -> list[Vectors]:
    return [np.frombuffer(outcome.pooled or b"", "<f4") for outcome in outcomes]


def assert_same_direction(found: Sequence[Vectors], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        cosine = torch.nn.functional.cosine_similarity(torch.tensor(one), other, dim=0)
        assert cosine >= 0.99999
        assert np.linalg.norm(one) == pytest.approx(1.0, abs=1e-6)


POOLED = {"last": lambda h: h[-1], "mean": lambda h: h.mean(dim=0), "cls": lambda h: h[0]}


@pytest.mark.parametrize("pooling_type", POOLED)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_embeddings_equal_those_of_transformers(
    embedder: tuple[Path, list[torch.Tensor]], pooling_type: str, backend: str
) -> None:
    folder, hidden = embedder
    options = {**OPTIONS, "cpu_backend": backend, "pooling_type": pooling_type}
    with Engine(str(folder), batch_invariant=True, **options) as engine:
        first, again = run(engine), run(engine)
        alone = [run(engine, prompts=[prompt])[0] for prompt in PROMPTS]
        halves = vectors(run(engine, PoolingParams(dimensions=32)))
        bare = vectors(run(engine, PoolingParams(normalize=False)))
    expected = [POOLED[pooling_type](states) for states in hidden]
    assert_same_direction(vectors(first), expected)
    assert_same_direction(halves, [one[:32] for one in expected])
    for one, other in zip(bare, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-4)
    # Bitwise equal with other batches, chunks, and cached prefixes of pooling that needs one token.
    assert [o.pooled for o in again] == [o.pooled for o in alone] == [o.pooled for o in first]
    assert any(outcome.num_cached > 0 for outcome in again) == (pooling_type == "last")


@pytest.mark.parametrize(("backend", "pooling_type"), [("native", "last"), ("torch", "cls")])
def test_embeddings_with_adapters_equal_those_of_merged_weights(
    tmp_path: Path, backend: str, pooling_type: str
) -> None:
    """A request's adapter is selected by its first token."""
    base = tmp_path / "base"
    write_checkpoint("qwen3", base)
    adapter = write_adapter(base, tmp_path / "adapter", 4)
    merged = merge_adapter(base, adapter, tmp_path / "merged")
    options = {**OPTIONS, "cpu_backend": backend, "pooling_type": pooling_type, "task": "embed"}
    with engine_with([adapter])(str(base), **options) as engine:
        found = vectors(run(engine))
    assert {adapter_of(prompt, 1) for prompt in PROMPTS} == {0, 1}
    for number, folder in enumerate((base, merged)):
        mine = [index for index, prompt in enumerate(PROMPTS) if adapter_of(prompt, 1) == number]
        with Engine(str(folder), **options) as engine:
            expected = vectors(run(engine, prompts=[PROMPTS[index] for index in mine]))
        assert_same_direction([found[i] for i in mine], [torch.tensor(one) for one in expected])


def test_two_ranks(embedder: tuple[Path, list[torch.Tensor]]) -> None:
    folder, hidden = embedder
    with Engine(str(folder), tensor_parallel_size=2, **OPTIONS) as engine:
        assert_same_direction(vectors(run(engine)), [states[-1] for states in hidden])


def test_scarce_pages_and_a_prompt_of_the_whole_cache(
    embedder: tuple[Path, list[torch.Tensor]],
) -> None:
    folder, hidden = embedder
    prompts = [*PROMPTS, make_prompts((112,))[0]]
    with Engine(str(folder), **{**OPTIONS, "kv_cache_tokens": 112}) as engine:
        found = run(engine, prompts=prompts)
    assert_same_direction(vectors(found[:-1]), [states[-1] for states in hidden])


def test_labels_equal_those_of_transformers(
    embedder: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    config = {"num_labels": 3, "pad_token_id": 0}
    model = Qwen3ForSequenceClassification.from_pretrained(embedder[0], **config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in PROMPTS]
    with Engine(str(tmp_path), **OPTIONS) as engine:
        info = engine.core.info.pooling
        assert info is not None
        assert (info.task, info.size, info.activation) == ("classify", 3, "softmax")
        assert info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        found = vectors(run(engine))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "llama"])  # tied, and with an LM head
def test_a_reranker_answers_yes_or_no(tmp_path: Path, name: str) -> None:
    model = write_checkpoint(name, tmp_path)
    vocabulary = {"[UNK]": 0, "no": 17, "yes": 400}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    with torch.inference_mode():
        expected = [
            model(torch.tensor([prompt])).logits[0, -1, [17, 400]].numpy() for prompt in PROMPTS
        ]
    with Engine(str(tmp_path), task="score", **OPTIONS) as engine:
        info = engine.core.info.pooling
        assert info is not None
        assert (info.labels, info.activation) == (("no", "yes"), "softmax")
        found = vectors(run(engine))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_speculative_decoding_is_rejected(embedder: tuple[Path, list[torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match="--speculative-method is not supported for pooling"):
        Engine(str(embedder[0]), speculative_method="ngram", **OPTIONS)


def test_tasks_by_the_checkpoint(embedder: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> None:
    folder = embedder[0]
    raw = json.loads((folder / "config.json").read_text())

    def task(architecture: str, **options: Any) -> str | None:
        content = {**raw, "architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(content))
        pooling = PoolingOptions(**options)
        found = load_model_config(str(tmp_path), weights=False, pooling=pooling).pooling
        return None if found is None else found.info.task

    assert task("Qwen3ForCausalLM") is None
    assert task("Qwen3Model") == task("Qwen3ForCausalLM", runner="pooling") == "embed"
    assert task("Qwen3ForCausalLM", task="embed") == "embed"
    assert task("Qwen3ForSequenceClassification") == "classify"
    assert task("Qwen3ForSequenceClassification", task="embed") == "embed"
    with pytest.raises(ValueError, match="needs a classification head"):
        task("Qwen3ForCausalLM", task="classify")
    with pytest.raises(ValueError, match="--task embed is not supported for architectures"):
        task("Qwen3VLForConditionalGeneration", task="embed")
    (tmp_path / "modules.json").write_text(
        json.dumps(
            [
                {"path": "", "type": "sentence_transformers.models.Transformer"},
                {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True, "include_prompt": True}))
    assert task("Qwen3ForCausalLM") == "embed"
    info = load_model_config(str(tmp_path), weights=False).pooling
    assert info is not None
    assert (info.info.pooling_type, info.info.normalize) == ("mean", False)
    for content in (
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
    ):
        pooling.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="is not supported"):
            task("Qwen3ForCausalLM")
    modules = [{"path": "../x", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="refers to the folder"):
        task("Qwen3ForCausalLM")
    assert task("Qwen3ForCausalLM", task="generate") is None
