"""Paged attention with grouped query heads: one query per row (decode) or many (extend).

A backend plans each step once; what it returns attends in every layer.
"""

from __future__ import annotations

import importlib
import logging
from typing import cast

from kernels.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSettings,
    AttentionStep,
    CapturableBackend,
)
from kernels.registry import registry

logger = logging.getLogger(__name__)


WHY = {
    "triton": "attends as every model family here does, and its steps replay CUDA graphs, with "
    "prompts or without; libraries do so without prompts alone",
    "torch": "ops run on torch and the compiled library here",
}
"""Why `--attention-backend auto` takes the backend that the ops run on: libraries are for those who
name them, none was measured here."""


def create_attention_backend(name: str, settings: AttentionSettings) -> AttentionBackend:
    """The backend that `create` of `kernels/attention/{name}_backend.py` makes.

    Args:
        name: value of `--attention-backend`; for auto see `WHY`.
        settings: what it is to serve.

    Raises:
        ValueError: it cannot work here; the message says what would help.
    """
    if name == "auto":
        name = "triton" if registry.uses_triton(settings.device) else "torch"
        logger.info("attention backend %s: %s", name, WHY[name])
    module = importlib.import_module(f"kernels.attention.{name}_backend")
    return cast("AttentionBackend", module.create(settings))


__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSettings",
    "AttentionStep",
    "CapturableBackend",
    "create_attention_backend",
]
