"""EXAONE 4 and 4.5 (huggingface.co/LGAI-EXAONE). Imports no torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import AlternatingFamilyConfig
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import Count, Index, Number, Yes, words


class Exaone4Config(AlternatingFamilyConfig):
    """EXAONE 4: sliding windows in all but every fourth layer; the others have no rotary
    embedding."""

    architecture = "Exaone4ForCausalLM"
    model_types = ("exaone4",)
    implementation = "exaone4:Exaone4ForCausalLM"
    extra_keys = ("sliding_window",)
    harmless = words("num_nextn_predict_layers mtp_loss_scaling_factor mtp_share_layers")
    skipped = ("mtp.",)

    max_position_embeddings: Count = 2048
    num_key_value_heads: Count | None = 32
    rms_norm_eps: Number = 1e-5
    use_qk_norm: Yes = True
    sliding_window: Index | None = 4096
    sliding_window_pattern: Index | str = 4
    eos_token_id: Any = 2


FAMILIES = (Exaone4Config,)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Exaone4_5_ForConditionalGeneration",),
        model_type="exaone4_5",
        texts={"exaone4_5_text": "Exaone4ForCausalLM", "exaone4": "Exaone4ForCausalLM"},
        keys=words(
            """
            vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
            vision_token_id
            """
        ),
        tensors=TensorNames(
            renamed=(("model.language_model.", "model."),), skipped=("visual.", "model.visual.")
        ),
    ),
)
