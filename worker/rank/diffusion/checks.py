"""Whether an engine's configuration suits a block-diffusion model."""

from __future__ import annotations

from worker.config import EngineConfig
from worker.models.config import ModelConfig


def check_blocks(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError, with what to change, where it does not. Nothing else can fail here."""
    size = model.block_size
    if size == 1:
        return
    if config.page_size % size:
        raise ValueError(
            f"--page-size {config.page_size} must be a multiple of this model's block size, {size}"
        )
    if config.max_num_batched_tokens < 2 * size:
        raise ValueError(
            f"--max-num-batched-tokens must be at least two blocks of this model, {2 * size}"
        )
    if config.speculative_method != "none":
        raise ValueError(
            f"--speculative-method {config.speculative_method} drafts single tokens, this "
            "model decides blocks: use none"
        )
