"""Prefixes of texts in config_sentence_transformers.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
        ({"prompts": {"a": ""}, "default_prompt_name": "b"}, "'b' in .* is not in prompts"),
    ],
)
def test_malformed_files(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)
