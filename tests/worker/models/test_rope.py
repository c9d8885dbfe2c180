"""Frequencies equal transformers' for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.models.config.rope_config import parse_rope
from worker.models.layers.rope import cos_sin_table

KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind["rope_type"]))
def test_table_equals_transformers(kind: dict[str, Any]) -> None:
    length, head_dim = 512, 64
    parameters = {**kind, "rope_theta": 5000.0}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            rope_parameters=dict(parameters),
            head_dim=head_dim,
            max_position_embeddings=length,
        )
    )
    cos, sin = reference(torch.zeros(1), torch.arange(length).unsqueeze(0))
    rope = parse_rope({"rope_parameters": parameters}, length)
    table = cos_sin_table(rope, head_dim, length, torch.device("cpu"))
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=1e-5, rtol=0)
