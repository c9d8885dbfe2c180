"""GLM-4.5 to 4.7 (huggingface.co/zai-org), and Solar Open (huggingface.co/upstage): routed and
shared experts.

Schema: `config/vendors/zai.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.moe import MoeNames


class Glm4MoeForCausalLM(Qwen3MoeForCausalLM):
    """GLM-4.5: rotary embedding in half of each head; the first layers are dense."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="gate.e_score_correction_bias")
