"""GLM-4.5 to 4.7 (huggingface.co/zai-org), Solar Open (huggingface.co/upstage) and dots.llm1
(huggingface.co/rednote-hilab): routed and shared experts.

Schemas: `zai.py`, `upstage.py` and `rednote.py` in `config/vendors/`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.moe import MoeNames


class Glm4MoeForCausalLM(Qwen3MoeForCausalLM):
    """GLM-4.5: rotary embedding in half of each head; the first layers are dense."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="gate.e_score_correction_bias")
