"""Schemas of Qwen (huggingface.co/Qwen), and SDAR (huggingface.co/JetLM), which is derived from
Qwen3. Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.checkpoint import positive_integer
from worker.models.config.family import (
    FULL,
    LINEAR,
    SLIDING,
    Biases,
    FamilyConfig,
    WindowedFamilyConfig,
    blocks,
    period_of,
)
from worker.models.config.moe_config import MoeConfig
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, One, Yes, words

_SDAR_HARMLESS = words(
    "debug ep_size fuse_cross_entropy micro_forward skip_checkpoint use_regular_causal"
)


class QwenConfig(FamilyConfig):
    """Qwen 1. Sequences are limited to `seq_length`, beyond which rotary embedding and queries
    would be scaled by the sequence's length."""

    architecture = "QWenLMHeadModel"
    model_types = ("qwen",)
    implementation = "qwen:QWenLMHeadModel"
    harmless = words(
        """
        attn_dropout_prob emb_dropout_prob bf16 fp16 fp32 use_dynamic_ntk use_logn_attn
        onnx_safe softmax_in_fp32 use_cache_kernel
        """
    )

    kv_channels: Count = 128
    layer_norm_epsilon: Number = 1e-6
    max_position_embeddings: Count = 8192
    no_bias: bool = True
    rotary_emb_base: Number = 10000
    rotary_pct: One = 1.0
    scale_attn_weights: Yes = True
    seq_length: Count = 8192

    def derive(self) -> None:
        """Sets the keys of other families from the keys of Qwen 1, whose `intermediate_size` counts
        gate and up together."""
        self.head_dim = self.kv_channels
        self.num_key_value_heads = self.num_attention_heads
        self.intermediate_size //= 2
        self.rms_norm_eps = self.layer_norm_epsilon
        self.rope_theta = self.rotary_emb_base
        self.max_position_embeddings = min(self.seq_length, self.max_position_embeddings)

    def biases(self) -> Biases:
        """Biases of all projections; only of q, k and v if `no_bias` is set."""
        return Biases(True, not self.no_bias, not self.no_bias)


class QwenWindowsConfig(WindowedFamilyConfig):
    """Keys of Qwen's sliding windows. Windows are in the layers that `layer_types` lists or, if it
    is missing, in layer `max_window_layers` and all later ones."""

    layer_kinds = (FULL, SLIDING)

    max_position_embeddings: Count = 32768
    num_key_value_heads: Count | None = 32
    use_sliding_window: bool = False
    sliding_window: Index | None = 4096
    max_window_layers: Index = 28

    def layer_kind(self, index: int) -> str:
        """Sliding windows, starting with layer `max_window_layers`."""
        return FULL if index < self.max_window_layers else SLIDING

    def window(self) -> int | None:
        """Sliding window in tokens, if it is enabled."""
        return self.sliding_window if self.use_sliding_window else None


class Qwen2Config(QwenWindowsConfig):
    """Schema of dense Qwen2 and Qwen2.5."""

    architecture = "Qwen2ForCausalLM"
    model_types = ("qwen2",)
    implementation = "llama:LlamaForCausalLM"

    dual_chunk_attention_config: dict[str, Any] | None = None

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=True)

    def spans(self) -> dict[str, int]:
        """Dual-chunk attention is equal to full attention within the context of one chunk."""
        if not self.dual_chunk_attention_config:
            return {}
        chunk, local = (
            positive_integer(self.dual_chunk_attention_config, key, "dual_chunk_attention_config.")
            for key in ("chunk_size", "local_size")
        )
        return {f"dual_chunk_attention_config of {chunk - local} tokens": chunk - local}


class Qwen3Config(QwenWindowsConfig):
    """Dense Qwen3. A checkpoint may have an MTP head in Qwen3.5's format."""

    architecture = "Qwen3ForCausalLM"
    model_types = ("qwen3",)
    implementation = "llama:LlamaForCausalLM"
    skipped = ("mtp.",)

    head_dim: Count | None = 128
    attention_bias: bool = False
    use_qk_norm: Yes = True

    def mtp(self) -> MtpConfig | None:
        """The MTP head in the format of Qwen3.5."""
        return MtpConfig.qwen()


class SdarConfig(Qwen3Config):
    """Dense SDAR: Qwen3 trained for block diffusion."""

    architecture = "SDARForCausalLM"
    model_types = ("sdar",)
    harmless = _SDAR_HARMLESS

    num_key_value_heads: Count | None = 8
    block_size: Count = 4
    mask_token_id: Index = 151669

    def block_diffusion(self) -> tuple[int, int]:
        """Block size and mask token."""
        return blocks(self.block_size, self.mask_token_id, self.vocab_size)


def _dense_layers(num_layers: int, step: int, mlp_only: list[int] | None) -> frozenset[int]:
    """Layers with an MLP instead of experts: those that `mlp_only_layers` lists, and all but every
    n-th, where n is `decoder_sparse_step`."""
    return frozenset(
        layer for layer in range(num_layers) if layer in (mlp_only or ()) or (layer + 1) % step
    )


class _QwenExperts(FamilyConfig):
    """Keys of Qwen's experts."""

    harmless = ROUTER_KEYS
    aliases = (("num_local_experts", "num_experts"),)

    max_position_embeddings: Count = 32768
    num_experts: Count = 128
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def shared_size(self) -> int:
        """Intermediate size of the shared expert; 0 if there is none."""
        return 0

    def moe(self) -> MoeConfig:
        """Experts in all layers except the dense ones."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=_dense_layers(
                self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers
            ),
            normalize=self.norm_topk_prob,
            shared_size=self.shared_size(),
        )


class Qwen2MoeConfig(_QwenExperts):
    """Schema of Qwen1.5-MoE and Qwen2-MoE, which have a shared expert."""

    architecture = "Qwen2MoeForCausalLM"
    model_types = ("qwen2_moe",)
    implementation = "qwen3_moe:Qwen2MoeForCausalLM"
    harmless = ROUTER_KEYS | {"sliding_window"}

    num_key_value_heads: Count | None = 16
    num_experts: Count = 60
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1408
    shared_expert_intermediate_size: Index = 5632
    qkv_bias: bool = True

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.qkv_bias)

    def shared_size(self) -> int:
        """Intermediate size of the shared expert."""
        return self.shared_expert_intermediate_size


class Qwen3MoeConfig(_QwenExperts):
    """Schema of Qwen3-MoE. `max_window_layers` has no effect."""

    architecture = "Qwen3MoeForCausalLM"
    model_types = ("qwen3_moe",)
    implementation = "qwen3_moe:Qwen3MoeForCausalLM"
    layer_kinds = (SLIDING,)

    num_key_value_heads: Count | None = 4
    attention_bias: bool = False
    use_qk_norm: Yes = True
    use_sliding_window: bool = False
    sliding_window: Index | None = 4096

    def window(self) -> int | None:
        """Sliding window in tokens, if it is enabled."""
        return self.sliding_window if self.use_sliding_window else None


class SdarMoeConfig(Qwen3MoeConfig):
    """SDAR with experts: Qwen3-MoE trained for block diffusion."""

    architecture = "SDARMoeForCausalLM"
    model_types = ("sdar_moe",)
    harmless = ROUTER_KEYS | _SDAR_HARMLESS

    head_dim: Count | None = 128
    norm_topk_prob: bool = True
    block_size: Count = 4
    mask_token_id: Index = 151669

    def block_diffusion(self) -> tuple[int, int]:
        """Block size and mask token."""
        return blocks(self.block_size, self.mask_token_id, self.vocab_size)


class _DeltaNet(FamilyConfig):
    """Keys of Qwen's gated delta networks: linear attention in all but every n-th layer, where n is
    `full_attention_interval`."""

    layer_kinds = (FULL, LINEAR)
    skipped = ("mtp.",)
    extra_keys = (
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    )

    max_position_embeddings: Count = 32768
    head_dim: Count | None = 256
    attention_bias: bool = False
    use_qk_norm: Yes = True
    partial_rotary_factor: Number = 0.25
    full_attention_interval: Index = 4
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32

    def layer_kind(self, index: int) -> str:
        """Full attention in every n-th layer."""
        period = period_of("full_attention_interval", self.full_attention_interval)
        return LINEAR if (index + 1) % period else FULL

    def mtp(self) -> MtpConfig:
        """The MTP head, whose layer has full attention."""
        return MtpConfig.qwen()

    def divided(self) -> dict[str, int]:
        """The number of key heads of linear attention, which are divided among the ranks."""
        return {"the number of linear key heads": self.linear_num_key_heads}


class Qwen3NextConfig(_DeltaNet):
    """Schema of Qwen3-Next, which has routed experts and a shared expert."""

    architecture = "Qwen3NextForCausalLM"
    model_types = ("qwen3_next",)
    implementation = "qwen3_next:Qwen3NextForCausalLM"
    harmless = ROUTER_KEYS
    aliases = (("num_local_experts", "num_experts"),)

    num_key_value_heads: Count | None = 2
    num_experts: Count = 512
    num_experts_per_tok: Count = 10
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Index = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def moe(self) -> MoeConfig:
        """Experts in all layers except the dense ones."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=_dense_layers(
                self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers
            ),
            normalize=self.norm_topk_prob,
            shared_size=self.shared_expert_intermediate_size,
        )


class Qwen35Config(_DeltaNet):
    """Schema of the language model of dense Qwen3.5."""

    architecture = "Qwen3_5ForCausalLM"
    model_types = ("qwen3_5_text",)
    implementation = "qwen3_next:Qwen35ForCausalLM"
    harmless = words("mtp_num_hidden_layers mtp_use_dedicated_embeddings")

    num_key_value_heads: Count | None = 4
    attn_output_gate: Yes = True
    output_gate_type: Literal["swish", "silu"] = "swish"
    """Activation of the delta network's output gate, in Qwen3.6; both names have the same
    meaning."""
    mamba_ssm_dtype: Literal["float32"] = "float32"


class Qwen35MoeConfig(Qwen35Config):
    """The language model of Qwen3.5 with experts in all layers; the weights of a token's experts
    are normalized."""

    architecture = "Qwen3_5MoeForCausalLM"
    model_types = ("qwen3_5_moe_text",)
    harmless = Qwen35Config.harmless | ROUTER_KEYS
    aliases = (("num_local_experts", "num_experts"),)

    intermediate_size: Count = 512
    """Unused, since all layers have experts."""
    num_key_value_heads: Count | None = 2
    num_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Index = 512
    norm_topk_prob: Yes = True
    decoder_sparse_step: Literal[1] = 1

    def moe(self) -> MoeConfig:
        """Routed experts and a shared expert in all layers."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            shared_size=self.shared_expert_intermediate_size,
        )


FAMILIES = (
    *(QwenConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig),
    *(Qwen3NextConfig, Qwen35Config, Qwen35MoeConfig, SdarConfig, SdarMoeConfig),
)
_QWEN_VISION_KEYS = words(
    """
    vision_config image_token_id video_token_id vision_token_id vision_start_token_id
    vision_end_token_id language_model_only
    """
)
_QWEN2_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
    "eos_token_id": 151645,
}
_QWEN_VISION = TensorNames(
    renamed=(("model.language_model.", "model."),), skipped=("visual.", "model.visual.")
)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Qwen2VLForConditionalGeneration",),
        model_type="qwen2_vl",
        texts={"qwen2_vl_text": "Qwen2ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults=_QWEN2_DEFAULTS,
        text_type="qwen2_vl_text",
    ),
    MultimodalConfig(
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        model_type="qwen2_5_vl",
        texts={"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults=_QWEN2_DEFAULTS,
        text_type="qwen2_5_vl_text",
    ),
    MultimodalConfig(
        architectures=("Qwen3_5ForConditionalGeneration",),
        model_type="qwen3_5",
        texts={"qwen3_5_text": "Qwen3_5ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
    ),
    MultimodalConfig(
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        model_type="qwen3_5_moe",
        texts={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
    ),
    MultimodalConfig(
        architectures=("Qwen3VLForConditionalGeneration",),
        model_type="qwen3_vl",
        texts={"qwen3_vl_text": "Qwen3ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults={"max_position_embeddings": 128000, "rope_theta": 500000.0},
    ),
    MultimodalConfig(
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        model_type="qwen3_vl_moe",
        texts={"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults={
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        ignored=("tie_word_embeddings",),
    ),
)
