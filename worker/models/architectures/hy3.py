"""Hy3 (huggingface.co/tencent): per-head QK norm, and routed and shared experts.

Schema: `config/vendors/tencent.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.moe import MoeNames


class HYV3ForCausalLM(Qwen3MoeForCausalLM):
    """Hy3: Qwen3-MoE's layers with a router bias; the first layer is dense."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        router="router.gate", bias="expert_bias", shared="shared_mlp"
    )
