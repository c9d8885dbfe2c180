"""The defaults that a checkpoint recommends: values for sampling, and how long requests may be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
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


def recommended_sampling(model: str, source: str) -> dict[str, Any]:
    """Values for what a request leaves open.

    Args:
        model: the checkpoint's folder or Hub name.
        source: `auto` for what the checkpoint recommends, `vllm` for nothing, else a folder or Hub
            name whose generation_config.json does.

    Raises:
        ValueError: the source has no such file.
    """
    if source == "vllm":
        return {}
    if source == "auto":
        return load_sampling_defaults(model)
    if not (checkpoint_folder(source) / "generation_config.json").is_file():
        raise ValueError(f"--generation-config: there is no generation_config.json in {source}")
    return load_sampling_defaults(source)


def read_chat_template(given: str) -> str:
    """The Jinja source that `given` is, or that is in the file of that name.

    Raises:
        ValueError: it is neither.
    """
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--chat-template: cannot read {given} ({error}): name a file with a Jinja template"
        ) from error


def assumed_limits(model: str) -> Limits:
    """Limits that no worker of a checkpoint exceeds; of lengths alone, while none has reported its
    own."""
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
