"""Prefixes of texts and maximum lengths in the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker.models.config.model_config import ModelConfig
from worker.models.config.pooling import read_pooler
from worker.protocol.pooling import PoolingInfo, PoolingOptions

MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
QUERY = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"


def read(
    folder: Path, content: dict[str, Any] | None, architecture: str = "Qwen3Model"
) -> PoolingInfo:
    (folder / "1_Pooling").mkdir()
    for name, value in (
        ("modules.json", MODULES),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True}),
        ("config_sentence_transformers.json", content),
    ):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    raw = {"architectures": [architecture], "num_labels": 2}
    _, pooler = read_pooler(raw, folder, PoolingOptions(), ["Qwen3ForCausalLM"])
    assert pooler is not None
    return pooler.info


def test_prefixes_as_released(tmp_path: Path) -> None:
    """Keys of Qwen3-Embedding's file."""
    content = {
        "prompts": {"query": QUERY, "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    info = read(tmp_path, content)
    assert info.prompts == (("query", QUERY), ("document", ""))
    assert (info.default_prompt, info.pooling_type, info.normalize) == ("", "last", True)


@pytest.mark.parametrize("content", [None, {}, {"prompts": None, "__version__": {"torch": "2"}}])
def test_models_without_prefixes(tmp_path: Path, content: dict[str, Any] | None) -> None:
    info = read(tmp_path, content)
    assert (info.prompts, info.default_prompt) == ((), "")


def test_a_default_prefix(tmp_path: Path) -> None:
    content = {"prompts": {"passage": "passage: "}, "default_prompt_name": "passage"}
    assert read(tmp_path, content).default_prompt == "passage"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompts": {"query": 3}}, "must map names to strings"),
        ({"prompts": ["query"]}, "must map names to strings"),
        ({"prompts": {"a": ""}, "default_prompt_name": "b"}, '"b" in .* is not in prompts'),
    ],
)
def test_malformed_files(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


BERT = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 8} | dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), 16
)


@pytest.mark.parametrize(
    ("name", "content", "limit"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False}, 256),
        ("sentence_xlm-roberta_config.json", {"max_seq_length": 128}, 128),
        ("sentence_bert_config.json", {"max_seq_length": 514}, 512),  # more than the model's
        ("sentence_bert_config.json", {"max_seq_length": None}, 512),
        ("config_sentence_transformers.json", {"max_seq_length": 256}, 512),
    ],
)
def test_maximum_lengths(tmp_path: Path, name: str, content: dict[str, Any], limit: int) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    config = ModelConfig.parse(BERT, tmp_path)
    assert config.max_model_len == config.resolve_max_model_len(None) == limit
    with pytest.raises(ValueError, match=rf"{limit} \(max_.*{limit}.*lower it"):
        config.resolve_max_model_len(limit + 1)


def test_models_that_generate_text_have_no_such_limit(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    raw = {**BERT, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config = ModelConfig.parse({**raw, "max_position_embeddings": 64}, tmp_path)
    assert config.max_model_len == 64


@pytest.mark.parametrize("length", [0, True, "256", 1.5])
def test_malformed_lengths(tmp_path: Path, length: object) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    with pytest.raises(ValueError, match=r"sentence_bert_config.json must be a positive"):
        ModelConfig.parse(BERT, tmp_path)
