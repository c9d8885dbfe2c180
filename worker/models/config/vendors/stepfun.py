"""Schema of Step (huggingface.co/stepfun-ai). Does not import torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Literal

from worker.models.config.family import FULL, SLIDING, FamilyConfig, HeadSizes
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    Index,
    No,
    Number,
    RawConfig,
    Yes,
    short,
    words,
)

_BY_LAYER = words("layer_types mlp_layer_types rope_theta partial_rotary_factors use_rope_layers")
"""Per-layer lists, which may also have entries for multi-token prediction layers."""
_SCALING = words(
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor"
)


class Step3p5Config(FamilyConfig):
    """Step 3.5 Flash: gated attention; more query heads and a different rotary embedding in
    sliding-window layers; experts, whose activations may be clamped, in all but the first few
    layers.
    """

    architecture = "Step3p5ForCausalLM"
    model_types = ("step3p5",)
    implementation = "step3p5:Step3p5ForCausalLM"
    harmless = ROUTER_KEYS | words(
        """
        max_seq_len moe_layer_offset mtp_mlp_layer_types need_fp32_gate num_local_experts
        """
    )
    """Keys without effect. The router's data type is one of them, since the router always computes
    in fp32."""
    aliases = (
        ("num_attention_groups", "num_key_value_heads"),
        ("moe_num_experts", "n_routed_experts"),
        ("moe_top_k", "num_experts_per_tok"),
        ("share_expert_dims", "share_expert_dim"),
        ("num_mtp_layers", "num_nextn_predict_layers"),
    )
    extra_keys = ("query_pre_attn_scalar", "swiglu_limits", "swiglu_limits_shared")
    layer_kinds = (FULL, SLIDING)
    window_theta = "sliding_rope_theta"
    has_layer_shares = True
    unquantized = ("g_proj",)

    max_position_embeddings: Count = 128000
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    num_sliding_attention_heads: Count | None = None
    attention_other_setting: dict[str, Any] | None = None
    """Heads of sliding-window layers."""
    per_layer_config: dict[str, Any] | None = None
    """Heads of sliding-window layers, by layer."""
    rms_norm_eps: Number = 1e-5
    zero_centered: Yes = True
    use_qk_norm: Yes = True
    use_head_wise_attn_gate: Yes = True
    use_bidirectional_attention: No = False
    use_mfa: No = False
    sink: No = False
    att_impl_type: Literal["GQA"] = "GQA"
    query_pre_attn_scalar: Number | None = None
    attention_bias: bool = False
    sliding_rope_theta: Number = 10000.0
    use_rope_layers: list[Literal[True, 1]] | None = None
    yarn_only_types: list[Literal["full_attention"]] | None = None
    """Layer types to which `rope_scaling` applies."""
    sliding_window: Count | None = None
    num_nextn_predict_layers: Index = 0
    mtp_layer_types: list[str] | None = None
    """Types of the multi-token prediction layers, which may also be the last ones of
    `layer_types`."""
    moe_layers_enum: str | list[Index] | None = None
    """Layers with experts, as a list or separated by commas, if `mlp_layer_types` is missing."""
    use_moe: Yes = True
    moe_every_n_layer: Literal[1] = 1
    moe_router_activation: Literal["sigmoid"] = "sigmoid"
    use_moe_router_bias: Yes = True
    norm_expert_weight: Yes = True
    n_routed_experts: Count = 288
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1280
    share_expert_dim: Count = 1280
    moe_router_scaling_factor: Number = 1.0
    swiglu_limits: list[Number | None] | None = None
    """Limit of the experts' activations, per layer; null or 0 if there is none."""
    swiglu_limits_shared: list[Number | None] | None = None
    """Limit of the activations of shared experts and of MLPs in layers without experts, per layer;
    null or 0 if there is none."""

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with the key names of the schema: per-layer lists without multi-token
        prediction layers, and rope parameters by layer type."""
        keys = super().prepare(raw)
        count, further = keys.get("num_hidden_layers"), keys.get("num_nextn_predict_layers")
        for key in _BY_LAYER & keys.keys():
            values = keys[key]
            if type(count) is type(further) is int and isinstance(values, list):
                keys[key] = values[:count] if len(values) == count + further else values
                if key == "layer_types" and keys[key] != values:
                    keys.setdefault("mtp_layer_types", values[count:])
        tables = keys.get("rope_parameters") or {}
        if isinstance(tables, dict) and not {FULL, SLIDING} & tables.keys():
            kinds = keys.get("layer_types")
            kinds = [] if kinds is None else kinds
            if isinstance(kinds, list):  # the schema rejects anything else
                keys["rope_parameters"] = _tables(keys, kinds)
            for key in ("rope_theta", "partial_rotary_factors", "rope_scaling"):
                keys.pop(key, None)
        return keys

    def derive(self) -> None:
        """Sets `mlp_layer_types` from `moe_layers_enum` if it is missing; raises ValueError for
        malformed per-layer lists."""
        count, sparse = self.num_hidden_layers, self.moe_layers_enum
        for key in ("swiglu_limits", "swiglu_limits_shared"):
            limits = getattr(self, key)
            if limits is not None and len(limits) not in (count, count + self.next_layers()):
                raise ValueError(
                    f"{key} = {short(limits)} in config.json must have a limit for each of the "
                    f"{count} layers: fix it"
                )
        if isinstance(sparse, str):
            numbers = [number.strip() for number in sparse.split(",") if number.strip()]
            if not all(number.isdecimal() for number in numbers):
                raise ValueError(
                    f"moe_layers_enum = {short(sparse)} in config.json must be a comma-separated "
                    "list of layer indices: fix it"
                )
            sparse = list(map(int, numbers))
        if self.mlp_layer_types is None:
            chosen = range(3, count) if sparse is None else sparse
            self.mlp_layer_types = [
                "sparse" if layer in chosen else "dense" for layer in range(count)
            ]

    def layer_kind(self, index: int) -> str:
        """Full attention in all layers."""
        return FULL

    def window(self) -> int | None:
        """Sliding window in tokens."""
        if self.sliding_window is None and SLIDING in self.kinds_of_layers():
            raise ValueError(
                "sliding_window is missing from config.json: add it; it must be a positive integer"
            )
        return self.sliding_window

    def next_layers(self) -> int:
        """Number of multi-token prediction layers."""
        return self.num_nextn_predict_layers

    def layer_heads(self) -> tuple[int, ...]:
        """Number of query heads per layer; sliding-window layers may have more than the others."""
        heads = self._sliding_heads()
        kinds = self.kinds_of_layers()
        listed = {
            str(layer): {"num_attention_heads": heads}
            for layer, kind in enumerate(kinds)
            if kind == SLIDING
        }
        if self.per_layer_config not in (None, {}, listed):
            raise ValueError(
                f"per_layer_config = {short(self.per_layer_config)} in config.json is not "
                f"supported: it must set num_attention_heads to {heads} for every sliding-window "
                "layer and for no other layer; use another checkpoint"
            )
        return tuple(heads if kind == SLIDING else self.num_attention_heads for kind in kinds)

    def _sliding_heads(self) -> int:
        """Number of query heads of sliding-window layers."""
        other = self.attention_other_setting or {}
        sizes = {
            "attention_type": SLIDING,
            "num_attention_groups": self.kv_heads(),
            "head_dim": self.head_size(),
            "true_head_dim": self.head_size(),
        }
        heads = other.get("num_attention_heads", self.num_attention_heads)
        if type(heads) is not int or heads < 1:
            raise ValueError(
                f"num_attention_heads {short(heads)} of attention_other_setting in config.json "
                "must be a positive integer: fix it"
            )
        wrong = [k for k in other if k != "num_attention_heads" and other[k] != sizes.get(k)]
        if wrong:
            expected = f"must be {sizes[wrong[0]]}" if wrong[0] in sizes else "must be omitted"
            raise ValueError(
                f"{wrong[0]} = {short(other[wrong[0]])} of attention_other_setting in config.json "
                f"is not supported: it {expected}; use another checkpoint"
            )
        return self.num_sliding_attention_heads or heads

    def mtp(self) -> MtpConfig | None:
        """The MTP heads, each of which has a dense layer and its own LM head."""
        kinds = (self.mtp_layer_types or [])[: self.next_layers()]
        if not kinds or not {*kinds} <= {*self.layer_kinds}:
            return None
        first, *further = map(self._head, range(len(kinds)), kinds)
        return replace(first, further=tuple(further))

    def _head(self, number: int, kind: str) -> MtpConfig:
        """The MTP head with index `number`, without additional heads; `kind` is the type of its
        layer."""
        has_window = kind == SLIDING
        layer = f"model.layers.{self.num_hidden_layers + number}."
        return MtpConfig(
            layer=layer,
            embedding_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            projection=f"{layer}eh_proj",
            final_norm=f"{layer}transformer.shared_head.norm",
            lm_head=f"{layer}transformer.shared_head.output",
            window=self.window() if has_window else None,
            num_heads=self._sliding_heads() if has_window else None,
            is_dense=True,
            zeroes_first=False,
            recycles_normed=False,
            skipped=(f"{layer}embed_tokens.",),
        )

    def rotary_size(self) -> int:
        """Number of dimensions with rotary embedding in sliding-window layers."""
        return int(self.head_size() * self.rotary_share(SLIDING, 1.0))

    def full_heads(self) -> HeadSizes:
        """Heads of full-attention layers, which differ in their rotary dimensions."""
        return HeadSizes(
            head_dim=self.head_size(),
            num_kv_heads=self.kv_heads(),
            rotary_dim=int(self.head_size() * self.rotary_share(FULL, 1.0)),
        )

    def moe(self) -> MoeConfig:
        """Experts with a router bias, and a shared expert."""
        return MoeConfig(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=listed_dense_layers(self.mlp_layer_types, self.num_hidden_layers, None),
            sigmoid=True,
            has_bias=True,
            scale=self.moe_router_scaling_factor,
            shared_size=self.share_expert_dim,
        )


def _tables(keys: RawConfig, kinds: list[Any]) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type, from per-layer lists and the scaling of full-attention layers.
    If `kinds` is empty, all layers are full-attention layers."""
    tables: dict[str, dict[str, Any]] = {}
    for kind in (FULL, SLIDING):
        table = tables.setdefault(kind, {"rope_type": "default"})
        for key, name, most in (
            ("rope_theta", "rope_theta", sys.float_info.max),
            ("partial_rotary_factors", "partial_rotary_factor", 1),
        ):
            values = keys.get(key)
            if values is None:
                continue
            count = keys.get("num_hidden_layers")
            kinds = kinds or [FULL] * (count if type(count) is int else 1)
            values = values if isinstance(values, list) else [values] * len(kinds)
            own = [value for value, other in zip(values, kinds, strict=False) if other == kind]
            if (
                len(values) != len(kinds)
                or any(type(one) not in (int, float) or not 0 < one <= most for one in values)
                or any(one != own[0] for one in own)
            ):
                raise ValueError(
                    f"{key} = {short(values)} in config.json is not supported: it must have one "
                    f"number in (0, {most:g}] for each of the {len(kinds)} layers, equal for all "
                    "layers of one type in layer_types; use another checkpoint"
                )
            if own:
                table[name] = own[0]
    key = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    scaling = keys.get(key) or {}
    if not isinstance(scaling, dict) or not scaling.keys() <= _SCALING:
        raise ValueError(
            f"{key} = {short(scaling)} in config.json is not supported: it must be an object that "
            f"has only llama3's keys ({', '.join(sorted(_SCALING))})"
        )
    tables[FULL] |= scaling
    return tables


FAMILIES = (Step3p5Config,)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Step3p7ForConditionalGeneration",),
        model_type="step3p7",
        texts={"step3p5": "Step3p5ForCausalLM"},
        keys=words(
            """
            vision_config image_token_id image_token_len patch_token_len projector_bias
            understand_projector_stride im_start_token im_end_token
            """
        ),
        tensors=TensorNames(
            renamed=(("model.language_model.", "model."),),
            skipped=("vision_model.", "vit_large_projector."),
        ),
    ),
)
