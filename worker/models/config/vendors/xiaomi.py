"""Schemas of MiMo (huggingface.co/XiaomiMiMo). Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from worker.models.config.family import FULL, SLIDING, Biases, FamilyConfig, HeadSizes
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.schema import Count, No, Number, RawConfig, Yes, only, short, words
from worker.models.config.vendors.qwen import QwenWindowsConfig


class MiMoConfig(QwenWindowsConfig):
    """MiMo, which has Qwen2's layers."""

    architecture = "MiMoForCausalLM"
    model_types = ("mimo",)
    implementation = "llama:LlamaForCausalLM"
    harmless = frozenset({"num_nextn_predict_layers"})
    skipped = ("model.mtp_layers.",)

    max_position_embeddings: Count = 32768
    attention_bias: bool = True

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.attention_bias)

    def mtp(self) -> MtpConfig:
        """The MTP head, whose projection reads the hidden state first, then the embedding."""
        layer = "model.mtp_layers.0."
        return MtpConfig(
            layer=layer,
            embedding_norm=f"{layer}token_layernorm",
            hidden_norm=f"{layer}hidden_layernorm",
            projection=f"{layer}input_proj",
            final_norm=f"{layer}final_layernorm",
            hidden_first=True,
        )


class MiMoV2FlashConfig(FamilyConfig):
    """MiMo V2 Flash: value heads narrower than key heads; most layers have sliding windows,
    attention sinks and more KV heads."""

    architecture = "MiMoV2FlashForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("mimo_v2_flash",)
    implementation = "mimo_v2:MiMoV2ForCausalLM"
    harmless = words(
        "attention_chunk_size hybrid_block_size moe_router_dtype num_nextn_predict_layers"
    )
    """Keys without effect. The router's data type is one of them, since the router always computes
    in fp32."""
    aliases = (("layernorm_epsilon", "rms_norm_eps"), ("num_local_experts", "n_routed_experts"))
    layer_kinds = (FULL, SLIDING)
    window_theta = "swa_rope_theta"
    has_layer_shares = True
    has_sinks = True
    skipped: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 192
    v_head_dim: Count = 128
    swa_num_attention_heads: Count | None = None
    swa_num_key_value_heads: Count | None = None
    """KV heads of sliding-window layers; if missing, twice `num_key_value_heads`."""
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 5000000.0
    swa_rope_theta: Number = 10000.0
    partial_rotary_factor: float | None = 0.334
    attention_bias: bool = False
    attention_value_scale: Number | None = 0.707
    attention_projection_layout: Annotated[str, only("split")] = "split"
    add_swa_attention_sink_bias: Yes = True
    add_full_attention_sink_bias: No = False
    sliding_window: Count = 129
    sliding_window_size: Count | None = None
    """Number of earlier tokens that a token attends to. Overrides transformers' `sliding_window`,
    which also counts the token itself."""
    hybrid_layer_pattern: list[Literal[0, 1]] | None = None
    """1 for each layer with a sliding window, otherwise 0; an alternative to `layer_types`."""
    moe_layer_freq: list[Literal[0, 1]] | None = None
    """1 for each layer with experts, otherwise 0; an alternative to `mlp_layer_types`."""
    n_routed_experts: Count = 256
    n_shared_experts: Literal[0] | None = None
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 2048
    n_group: Count = 1
    topk_group: Count = 1
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: Number | None = 1.0

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with the key names of the schema. Rope parameters for all layers are treated
        as the full-attention layers', since sliding-window layers have `swa_rope_theta`."""
        keys = super().prepare(raw)
        table = keys.get("rope_parameters")
        if isinstance(table, dict) and not table.keys() & {FULL, SLIDING}:
            keys["rope_parameters"] = {FULL: table}
        return keys

    def derive(self) -> None:
        """Sets `layer_types` and `mlp_layer_types`; raises ValueError if sliding-window layers have
        a different number of query heads, or heads of different sizes, than the other layers."""
        for key, size, other, own in (
            ("swa_head_dim", self.swa_head_dim, "head_dim", self.head_dim),
            ("swa_v_head_dim", self.swa_v_head_dim, "v_head_dim", self.v_head_dim),
            (
                *("swa_num_attention_heads", self.swa_num_attention_heads),
                *("num_attention_heads", self.num_attention_heads),
            ),
        ):
            if size not in (None, own):
                raise ValueError(
                    f"{key} = {size} in config.json is not supported: it must equal {other} ({own})"
                )
        if self.v_head_dim > self.head_size():
            raise ValueError(
                f"v_head_dim = {self.v_head_dim} in config.json is not supported: it must be at "
                f"most head_dim ({self.head_size()})"
            )
        for key, listing, names in (
            ("hybrid_layer_pattern", "layer_types", (FULL, SLIDING)),
            ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
        ):
            flags, listed = getattr(self, key), getattr(self, listing)
            kinds = listed if flags is None else [names[flag] for flag in flags]
            if flags is not None and (
                len(flags) != self.num_hidden_layers or listed not in (None, kinds)
            ):
                raise ValueError(
                    f"{key} = {short(flags)} in config.json is not supported: it must have 0 or 1 "
                    f"for each of the {self.num_hidden_layers} layers, and match {listing} if that "
                    "is set"
                )
            setattr(self, listing, kinds)

    def layer_kind(self, index: int) -> str:
        """Full attention in the first layer and in every sixth layer."""
        return SLIDING if index and (index + 1) % 6 else FULL

    def window(self) -> int:
        """Sliding window in tokens."""
        size = self.sliding_window_size
        return self.sliding_window if size is None else size + 1

    def rotary_size(self) -> int:
        """Number of dimensions with rotary embedding in sliding-window layers."""
        return self._rotary_size(SLIDING)

    def full_heads(self) -> HeadSizes:
        """Heads of full-attention layers, which have fewer KV heads."""
        return HeadSizes(
            head_dim=self.head_size(),
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            rotary_dim=self._rotary_size(FULL),
        )

    def kv_heads(self) -> int:
        """Number of KV heads in sliding-window layers."""
        return self.swa_num_key_value_heads or 2 * super().kv_heads()

    def value_size(self) -> int | None:
        """Dimensions of a value, if they differ from those of a key; otherwise None."""
        return None if self.v_head_dim == self.head_size() else self.v_head_dim

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.attention_bias)

    def moe(self) -> MoeConfig:
        """Experts as in DeepSeek V3, but without a shared expert, in all but the first layer."""
        count = self.num_hidden_layers
        return MoeConfig(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=listed_dense_layers(self.mlp_layer_types, count, None),
            normalize=self.norm_topk_prob,
            sigmoid=True,
            has_bias=True,
            num_groups=self.n_group,
            top_k_groups=self.topk_group,
            scale=1.0 if self.routed_scaling_factor is None else self.routed_scaling_factor,
        )

    def mtp(self) -> MtpConfig:
        """The first MTP head, whose layer is dense and has a sliding window."""
        heads, layer = "model.mtp.layers.", "model.mtp.layers.0."
        return MtpConfig(
            layer=layer,
            embedding_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            projection=f"{layer}eh_proj",
            final_norm=f"{layer}final_layernorm",
            window=self.window(),
            is_dense=True,
            zeroes_first=False,
            skipped=tuple(f"{heads}{digit}" for digit in range(1, 10)),
        )

    def extra(self) -> dict[str, Any]:
        """Factor applied to values, and whether q, k and v are fused."""
        scale, layout = self.attention_value_scale, self.attention_projection_layout
        return {
            "attention_value_scale": 1.0 if scale is None else scale,
            "is_fused": layout == "fused_qkv",
        }

    def _rotary_size(self, kind: str) -> int:
        share = self.partial_rotary_factor
        share = self.rotary_share(kind, 0.334 if share is None else share)
        return int(self.head_size() * share)


class MiMoV2Config(MiMoV2FlashConfig):
    """MiMo V2.5 and V2.5 Pro: MiMo V2 Flash, optionally with a fused QKV tensor. V2.5's encoders
    for images, videos and audio are not loaded."""

    architecture = "MiMoV2ForCausalLM"
    model_types = ("mimo_v2", "mimo_v2_flash")
    harmless = MiMoV2FlashConfig.harmless | words(
        """
        vision_config audio_config processor_config vision_model_type image_token_id video_token_id
        audio_token_id vision_start_token_id vision_end_token_id audio_start_token_id
        audio_end_token_id
        """
    )
    skipped = (*MiMoV2FlashConfig.skipped, "visual.", "audio_encoder.", "speech_embeddings.")

    attention_projection_layout: Annotated[str, only("split", "fused_qkv")] = "split"


FAMILIES = (MiMoConfig, MiMoV2FlashConfig, MiMoV2Config)
