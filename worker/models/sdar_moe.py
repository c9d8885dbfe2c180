"""SDAR with mixtures of experts: Qwen3-MoE whose tokens are decided block by block."""

from __future__ import annotations

from worker.models.qwen3_moe import Qwen3MoeForCausalLM


class SDARMoeForCausalLM(Qwen3MoeForCausalLM):
    """See SDARForCausalLM."""
