"""Sampling defaults that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

import logging
from typing import Any

from worker.wire.tokenizer import checkpoint_folder, read_json

logger = logging.getLogger(__name__)

APPLIED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NEUTRAL = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}


def load_sampling_defaults(model: str) -> dict[str, Any]:
    """Values for what a request leaves open, as vLLM applies them; empty if none are given."""
    config = read_json(checkpoint_folder(model) / "generation_config.json")
    for name, neutral in NEUTRAL.items():
        if config.get(name) not in (None, neutral):
            logger.warning(
                "generation_config.json recommends %s %s, which is not applied", name, config[name]
            )
    return {name: config[name] for name in APPLIED if config.get(name) is not None}
