"""What a checkpoint recommends: values for sampling, and how long requests may be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from worker.wire.limits import Limits
from worker.wire.tokenizer import checkpoint_folder, read_json

logger = logging.getLogger(__name__)

APPLIED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NEUTRAL = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
UNSAID_LENGTH = 131_072
"""Tokens: the longest default of `max_position_embeddings` in transformers' configurations."""


def load_sampling_defaults(model: str) -> dict[str, Any]:
    """Values for what a request leaves open, as vLLM applies them; empty if none are given."""
    config = read_json(checkpoint_folder(model) / "generation_config.json")
    for name, neutral in NEUTRAL.items():
        if config.get(name) not in (None, neutral):
            logger.warning(
                "generation_config.json recommends %s %s, which is not applied", name, config[name]
            )
    return {name: config[name] for name in APPLIED if config.get(name) is not None}


def assumed_limits(model: str) -> Limits:
    """What no worker of a checkpoint exceeds; of lengths alone, while none has reported its own."""
    config = read_json(checkpoint_folder(model) / "config.json")
    positions = config.get("max_position_embeddings")
    length = positions if isinstance(positions, int) else UNSAID_LENGTH
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    if isinstance(factor, int | float) and factor > 1:
        length = int(length * factor)
    return Limits(
        max_model_len=length,
        max_total_tokens=length,
        vocab_size=0,
        block_size=1,
        dllm_algorithm="",
    )
