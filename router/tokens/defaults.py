"""Defaults from a checkpoint's files: sampling parameters, chat template, length limits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.protocol.limits import Limits
from worker.protocol.text.end_tokens import eos_token_ids
from worker.protocol.text.tokenizer import checkpoint_folder, read_json

logger = logging.getLogger(__name__)

APPLIED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that become default sampling parameters, as in vLLM."""
NEUTRAL = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
"""Unsupported fields of generation_config.json, each with the value at which it has no effect."""
DEFAULT_LENGTH = 131_072
"""Assumed context length if config.json omits it: the largest default of
`max_position_embeddings` in transformers."""


def load_sampling_defaults(model: str) -> dict[str, Any]:
    """Default sampling parameters of a checkpoint's generation_config.json; empty if there is
    none."""
    config = read_json(checkpoint_folder(model) / "generation_config.json")
    for name, neutral in NEUTRAL.items():
        if config.get(name) not in (None, neutral):
            logger.warning(
                "ignoring unsupported generation_config.json setting %s=%s", name, config[name]
            )
    return {name: config[name] for name in APPLIED if config.get(name) is not None}


def recommended_sampling(model: str, source: str) -> dict[str, Any]:
    """Default sampling parameters of a model, as selected by --generation-config.

    Args:
        model: folder or Hub name of the checkpoint.
        source: `auto` for the checkpoint's generation_config.json, `vllm` for vLLM's defaults,
            otherwise the folder or Hub name of another generation_config.json. The EOS tokens in
            that file then become stop tokens of all requests; workers always end requests at the
            checkpoint's EOS tokens.

    Raises:
        ValueError: the source has no generation_config.json.
    """
    if source == "vllm":
        return {}
    if source == "auto":
        return load_sampling_defaults(model)
    if not (checkpoint_folder(source) / "generation_config.json").is_file():
        raise ValueError(
            f"--generation-config: no generation_config.json in {source}: use auto, vllm, or a "
            "folder that has one"
        )
    ends = eos_token_ids(read_json(checkpoint_folder(source) / "generation_config.json"))
    return load_sampling_defaults(source) | ({"stop_token_ids": ends} if ends else {})


def read_chat_template(given: str) -> str:
    """Loads a chat template: `given` is Jinja source, or the path of a file with it.

    Raises:
        ValueError: `given` is neither.
    """
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--chat-template: cannot read {given} ({error}): specify a file with a Jinja template"
        ) from error


def assumed_limits(model: str) -> Limits:
    """Upper bounds of the lengths that a checkpoint's workers support, used while none is ready."""
    config = read_json(checkpoint_folder(model) / "config.json")
    positions = config.get("max_position_embeddings")
    length = positions if isinstance(positions, int) else DEFAULT_LENGTH
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
        has_edit_tokens=False,
    )
