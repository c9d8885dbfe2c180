"""Grouped-query attention with a paged KV cache, for rows of one query (decode) or many (extend).

A backend plans each step once; all layers of the step use that plan.
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
    "triton": "supports all model families, and CUDA graphs for prefill and decode steps",
    "torch": "ops run on torch and the compiled CPU library",
}
"""Reason for the backend selected by `--attention-backend auto`, for the log. Library backends are
never selected, since they have not been benchmarked."""


def create_attention_backend(name: str, settings: AttentionSettings) -> AttentionBackend:
    """Creates an attention backend with `create` in `kernels/attention/{name}_backend.py`.

    Args:
        name: value of `--attention-backend`; "auto" selects triton if ops run on Triton on the
            device, otherwise torch.
        settings: properties of the model and of the engine.

    Raises:
        ValueError: the backend does not support the settings; the message names an alternative.
    """
    if name == "auto":
        name = "triton" if registry.uses_triton(settings.device) else "torch"
        logger.info("using attention backend %s: %s", name, WHY[name])
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
