"""GLM-4.5, 4.6 and 4.7 (huggingface.co/zai-org): experts beside one that every token takes."""

from __future__ import annotations

from typing import ClassVar

from worker.models.moe import MoeNames
from worker.models.qwen3_moe import Qwen3MoeForCausalLM


class Glm4MoeForCausalLM(Qwen3MoeForCausalLM):
    """Half of each head rotates; the first layers have a single MLP."""

    moe_names: ClassVar[MoeNames] = MoeNames(bias="gate.e_score_correction_bias")
