"""GLM-4.5 to 4.7 (huggingface.co/zai-org), Solar Open (huggingface.co/upstage): experts beside one
that every token takes."""

from __future__ import annotations

from typing import ClassVar

from worker.models.moe import MoeNames
from worker.models.qwen3_moe import Qwen3MoeForCausalLM


class Glm4MoeForCausalLM(Qwen3MoeForCausalLM):
    """GLM-4.5: half of each head rotates, and the first layers have a single MLP."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="gate.e_score_correction_bias")
