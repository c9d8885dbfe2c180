"""Paged attention with grouped query heads: one query per row (decode) or many (extend).

A backend plans each step once; what it returns attends in every layer.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import NamedTuple, cast

from kernels.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSettings,
    AttentionStep,
    CapturableBackend,
)
from kernels.registry import registry

logger = logging.getLogger(__name__)


class AutomaticChoice(NamedTuple):
    """A backend that `--attention-backend auto` may take."""

    name: str
    suits: Callable[[AttentionSettings], bool]
    """Whether it serves what there is to serve."""
    why: str
    """It is taken where it does."""


AUTO = (
    AutomaticChoice(
        "triton",
        lambda settings: registry.uses_triton(settings.device),
        "attends as every model family here does, and its steps replay CUDA graphs, with prompts "
        "or without; libraries do so without prompts alone",
    ),
    AutomaticChoice(
        "torch",
        lambda settings: True,
        "ops run on torch and the compiled library here",
    ),
)
"""The first that suits is taken. Libraries are for those who name them: none was measured here."""


def create_attention_backend(name: str, settings: AttentionSettings) -> AttentionBackend:
    """The backend that `create` of `kernels/attention/{name}_backend.py` makes.

    Args:
        name: value of `--attention-backend`; for auto see `AUTO`.
        settings: what it is to serve.

    Raises:
        ValueError: it cannot work here; the message says what would help.
    """
    if name == "auto":
        choice = next(choice for choice in AUTO if choice.suits(settings))
        name = choice.name
        logger.info("attention backend %s: %s", name, choice.why)
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
