"""SDAR, dense: Qwen3 whose tokens are decided block by block (github.com/JetAstra/SDAR)."""

from __future__ import annotations

from worker.models.qwen3 import Qwen3ForCausalLM


class SDARForCausalLM(Qwen3ForCausalLM):
    """Qwen3's layers and tensor names. A position sees all of its block, and every earlier one;
    its logits are of its own token, not of the next."""
