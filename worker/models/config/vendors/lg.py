"""Schemas of EXAONE 3, 3.5, 4, 4.5 and K-EXAONE (huggingface.co/LGAI-EXAONE). Does not import
torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import AlternatingFamilyConfig, FamilyConfig
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, Yes, words


class ExaoneConfig(FamilyConfig):
    """EXAONE 3, 3.5 and Deep: Llama with different keys and names."""

    architecture = "ExaoneForCausalLM"
    model_types = ("exaone",)
    implementation = "exaone:ExaoneForCausalLM"
    harmless = words("embed_dropout")
    aliases = (
        ("num_layers", "num_hidden_layers"),
        ("layer_norm_epsilon", "rms_norm_eps"),
        ("activation_function", "hidden_act"),
    )

    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2


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


class ExaoneMoeConfig(Exaone4Config):
    """K-EXAONE: EXAONE 4's attention, with norms before the blocks, and experts."""

    architecture = "ExaoneMoeForCausalLM"
    other_architectures = ("ExaoneMoEForCausalLM",)
    model_types = ("exaone_moe",)
    implementation = "exaone4:ExaoneMoeForCausalLM"
    harmless = ROUTER_KEYS | words("num_nextn_predict_layers")
    skipped = ("mtp.",)

    eos_token_id: Any = 53
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1024
    num_shared_experts: Index = 1
    first_k_dense_replace: Index | None = None
    first_last_k_dense_replace: Index | None = None
    """Name of `first_k_dense_replace` in the first release."""
    is_moe_layer: list[bool] | None = None
    n_group: Index = 1
    topk_group: Index = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 2.5
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers, unless config.json lists others."""
        first = self.first_k_dense_replace
        dense = listed_dense_layers(
            self.mlp_layer_types,
            self.num_hidden_layers,
            self.first_last_k_dense_replace if first is None else first,
        )
        expected = [layer not in dense for layer in range(self.num_hidden_layers)]
        if self.is_moe_layer not in (None, expected):
            raise ValueError(
                "is_moe_layer in config.json disagrees with first_k_dense_replace, "
                "first_last_k_dense_replace or mlp_layer_types: fix it"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=dense,
            normalize=self.norm_topk_prob,
            sigmoid=True,
            has_bias=True,
            num_groups=self.n_group,
            top_k_groups=self.topk_group,
            scale=self.routed_scaling_factor,
            shared_size=self.moe_intermediate_size * self.num_shared_experts,
        )


FAMILIES = (ExaoneConfig, Exaone4Config, ExaoneMoeConfig)
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
