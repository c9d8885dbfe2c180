"""Vectors of bidirectional encoders equal transformers' with any batch and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.support.engines.engine_driver import Engine
from tests.support.engines.family_checks import make_prompts
from tests.support.engines.forked_rank import forking_ranks
from worker.llm import LLM, TokensPrompt
from worker.models.config.model_config import ModelConfig
from worker.protocol.pooling import PoolingParams
from worker.protocol.sampling import SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = dict.fromkeys([f"{name}_token_id" for name in ("pad", "eos", "bos", "cls", "sep")], 0)
KINDS = {
    "bert": (BertConfig, BertModel, 128),
    "roberta": (RobertaConfig, RobertaForMaskedLM, 130),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, 130),
    "modernbert": (ModernBertConfig, ModernBertModel, 128),
}
PROMPTS = [[2 + token % 507 for token in prompt] for prompt in make_prompts((1, 29, 62, 128))]
"""Without the padding token, whose positions RoBERTa does not count."""
OPTIONS = {"kv_cache_tokens": 512}
POOLED = {"cls": lambda h: h[0], "mean": lambda h: h.mean(dim=0)}


def write(kind: str, folder: Path) -> PreTrainedModel:
    config_class, model_class, length = KINDS[kind]
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = config_class(**SIZES, max_position_embeddings=length)
    if kind == "modernbert":
        config = config_class(**SIZES, **TOKENS, max_position_embeddings=length, local_attention=16)
    model: PreTrainedModel = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    return model


def vectors(engine: Engine, prompts: list[list[int]]) -> list[bytes]:
    found = engine.outcomes(prompts, SamplingParams(pooling=PoolingParams()))
    assert all(one.finish_reason == "stop" for one in found)
    return [one.pooled or b"" for one in found]


def expected(model: PreTrainedModel, pooling_type: str) -> list[torch.Tensor]:
    base = model.base_model
    with torch.inference_mode():
        states = [base(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    return [POOLED[pooling_type](one) for one in states]


def check(found: list[bytes], model: PreTrainedModel, pooling_type: str) -> None:
    for one, other in zip(found, expected(model, pooling_type), strict=True):
        vector = torch.frombuffer(bytearray(one), dtype=torch.float32)
        assert torch.nn.functional.cosine_similarity(vector, other, dim=0) >= 0.99999
        assert vector.norm() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "auto") for kind in KINDS), ("bert", "torch")]
)
def test_embeddings_equal_those_of_transformers(kind: str, backend: str, tmp_path: Path) -> None:
    model = write(kind, tmp_path)
    options = {"batch_invariant": True, "cpu_backend": backend, **OPTIONS}
    with Engine(str(tmp_path), **options) as engine:
        assert engine.core.info.max_model_len == 128
        is_native = engine.runner.model.encoder is not None
        assert is_native == (kind != "modernbert" and backend == "auto")
        first = vectors(engine, PROMPTS)
        alone = [vectors(engine, [prompt])[0] for prompt in PROMPTS]
    check(first, model, "cls")
    assert first == alone


def test_encoders_do_not_warn_about_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("bert", tmp_path)
    with Engine(str(tmp_path), **OPTIONS):
        assert "falling back" not in caplog.text


def test_encoders_that_the_library_does_not_support(tmp_path: Path) -> None:
    write("modernbert", tmp_path)
    with pytest.raises(ValueError, match=r"native cannot run this model \(ModernBertModel is not"):
        Engine(str(tmp_path), cpu_backend="native", **OPTIONS)


def test_mean_pooling_of_two_ranks(tmp_path: Path) -> None:
    model = write("bert", tmp_path)
    options = {**OPTIONS, "tensor_parallel_size": 2, "pooling_type": "mean"}
    with Engine(str(tmp_path), **options) as engine:
        check(vectors(engine, PROMPTS), model, "mean")


@pytest.mark.parametrize(
    ("kind", "model_class", "fields", "pooling_type"),
    [
        ("xlm-roberta", XLMRobertaForSequenceClassification, {}, "cls"),
        (
            *("modernbert", ModernBertForSequenceClassification),
            *({"classifier_pooling": "mean"}, "mean"),
        ),
    ],
)
def test_labels_equal_those_of_transformers(
    tmp_path: Path,
    kind: str,
    model_class: type[PreTrainedModel],
    fields: dict[str, str],
    pooling_type: str,
) -> None:
    write(kind, tmp_path)
    model = model_class.from_pretrained(tmp_path, num_labels=1, **fields).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("classifier", "head")):
                parameter.normal_(0.3, 0.2)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in PROMPTS]
    with Engine(str(tmp_path), **OPTIONS) as engine:
        info = engine.core.info.pooling
        assert info is not None
        assert (info.task, info.activation) == ("classify", "sigmoid")
        assert info.pooling_type == pooling_type
        found = [np.frombuffer(one, "<f4") for one in vectors(engine, PROMPTS)]
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)


def test_token_types_of_pairs(tmp_path: Path) -> None:
    """Separators within a text do not end it."""
    write("bert", tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "pooler" in name or name.startswith("classifier"):
                parameter.normal_(0.1, 0.3)
    model.save_pretrained(tmp_path)
    pairs = [([5, 3, 6, 7], [8, 9]), ([11], list(range(20, 80))), (list(range(30, 90)), [])]
    prompts, second_texts, logits = list[list[int]](), list[int](), list[np.ndarray]()
    for first, second in pairs:
        prompts.append([2, *first, 3, *second, 3])
        second_texts.append(len(first) + 2 if second else 0)
        types = [int(0 < second_texts[-1] <= place) for place in range(len(prompts[-1]))]
        with torch.inference_mode():
            found = model(torch.tensor(prompts[-1:]), token_type_ids=torch.tensor([types]))
        logits.append(found.logits[0].numpy())
    sampling = SamplingParams(pooling=PoolingParams())
    with Engine(str(tmp_path), **OPTIONS) as engine:
        results = dict(
            engine.submit(prompt, sampling, second_text=second_text)
            for prompt, second_text in zip(prompts, second_texts, strict=True)
        )
        engine.drain(results)
        values = [np.frombuffer(one.pooled or b"", "<f4") for one in results.values()]
    np.testing.assert_allclose(values, logits, rtol=1e-4, atol=1e-4)
    types = [0] * second_texts[0] + [1] * (len(prompts[0]) - second_texts[0])
    with forking_ranks(), LLM(str(tmp_path), cpu_threads=1, **OPTIONS) as llm:
        offline = TokensPrompt(prompt_token_ids=prompts[0], token_type_ids=types)
        np.testing.assert_allclose(llm.encode(offline)[0].outputs.data, logits[0], atol=1e-4)
        with pytest.raises(ValueError, match="must be zeros, then ones"):
            llm.encode(TokensPrompt(prompt_token_ids=prompts[0], token_type_ids=types[::-1]))


def test_what_is_not_supported(tmp_path: Path) -> None:
    write("bert", tmp_path)
    with pytest.raises(ValueError, match="--max-num-batched-tokens 64 must be at least 128"):
        Engine(str(tmp_path), max_num_batched_tokens=64, **OPTIONS)
    with pytest.raises(ValueError, match=r"architectures .* are not supported"):
        Engine(str(tmp_path), task="generate", **OPTIONS)


BERT = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
MODERN = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "reference_compile": True,
    "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}


def test_configurations_as_released(tmp_path: Path) -> None:
    """Keys as transformers 4 wrote them."""

    def read(raw: dict[str, Any]) -> ModelConfig:
        return ModelConfig.parse(raw, tmp_path)

    bert, modern = read(BERT), read(MODERN)
    assert (bert.max_model_len, bert.head_dim, bert.rms_norm_eps) == (512, 32, 1e-12)
    assert modern.window_rope is not None
    assert (modern.rope.theta, modern.window_rope.theta) == (160000.0, 10000.0)
    assert modern.extra is not None
    assert modern.extra["local_layers"][:4] == (False, True, True, False)
    roberta = {**BERT, "architectures": ["XLMRobertaForSequenceClassification"]}
    roberta |= {"model_type": "xlm-roberta", "pad_token_id": 1, "output_past": True}
    assert read({**roberta, "max_position_embeddings": 8194}).max_model_len == 8192
    for key, value in (
        ("hidden_act", "relu"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("unknown_key", 3),
    ):
        with pytest.raises(ValueError, match=key):
            read({**BERT, key: value})
    with pytest.raises(ValueError, match="max_position_embeddings 2 in config"):
        read({**roberta, "max_position_embeddings": 2})
