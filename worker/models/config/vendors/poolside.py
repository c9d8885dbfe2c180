"""Schema of Laguna (huggingface.co/poolside). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FULL, SLIDING, FamilyConfig, HeadSizes, table
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    Index,
    No,
    Number,
    RawConfig,
    Yes,
    short,
)


class LagunaConfig(FamilyConfig):
    """Laguna: gated attention. Full-attention and sliding-window layers differ in their number of
    heads and rotary embedding. All but the first layers have experts."""

    architecture = "LagunaForCausalLM"
    model_types = ("laguna",)
    implementation = "laguna:LagunaForCausalLM"
    harmless = ROUTER_KEYS
    extra_keys = ("gating",)
    layer_kinds = (FULL, SLIDING)
    window_theta = "swa_rope_theta"
    has_layer_shares = True

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    num_attention_heads_per_layer: list[Count] | None = None
    qkv_bias: No = False
    use_qk_norm: Yes = True
    gating: bool | Literal["per-head", "per-element"] = True
    """Size of the gate of the attention output: one feature per head (true or "per-head"), or one
    per output feature ("per-element")."""
    gating_types: list[Literal["per_head", "per_element"]] | None = None
    rope_theta: Number = 500000.0
    swa_rope_theta: Number = 10000.0
    rope_parameters: dict[str, Any] = table(
        full_attention={"rope_type": "default", "partial_rotary_factor": 0.5},
        sliding_attention={"rope_type": "default", "partial_rotary_factor": 1.0},
    )
    partial_rotary_factor: float | None = None
    """Fraction of rotary dimensions in layers whose `rope_parameters` do not have it."""
    sliding_window: Count = 512
    num_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    mlp_only_layers: list[Index] | None = None
    decoder_sparse_step: Literal[1] = 1
    norm_topk_prob: Yes = True
    moe_router_score_func: Literal["sigmoid"] = "sigmoid"
    moe_routed_scaling_factor: Number = 1.0
    moe_apply_router_weight_on_input: No = False
    moe_router_logit_softcapping: Number = 0.0

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with the key names of the schema: numbers next to the tables in
        `rope_parameters` belong to full-attention layers."""
        keys = super().prepare(raw)
        tables = keys.get("rope_parameters")
        if isinstance(tables, dict) and isinstance(full := tables.get(FULL), dict):
            beside = {key: value for key, value in tables.items() if key not in (FULL, SLIDING)}
            own = {key: value for key, value in tables.items() if key in (FULL, SLIDING)}
            keys["rope_parameters"] = {**own, FULL: {**beside, **full}}
        return keys

    def derive(self) -> None:
        """Sets `mlp_layer_types` from `mlp_only_layers` if it is missing; raises ValueError for an
        unsupported gate, or for malformed lists of layers."""
        if self.gating is False:
            raise ValueError(
                "gating = false in config.json is not supported: it must be true, 'per-head' or "
                "'per-element'"
            )
        kind = "per_element" if self.gating == "per-element" else "per_head"
        if self.gating_types and set(self.gating_types) != {kind}:
            raise ValueError(
                f"gating_types = {short(self.gating_types)} in config.json is not supported: it "
                f"must be {kind} for all layers, as specified by gating"
            )
        heads, count = self.num_attention_heads_per_layer, self.num_hidden_layers
        if heads is not None and len(heads) != count:
            raise ValueError(
                f"num_attention_heads_per_layer = {short(heads)} in config.json must have a number "
                f"of heads for each of the {count} layers: fix it"
            )
        dense = self.mlp_only_layers
        if dense is not None:
            kinds = ["dense" if layer in dense else "sparse" for layer in range(count)]
            if self.mlp_layer_types not in (None, kinds) or any(one >= count for one in dense):
                raise ValueError(
                    f"mlp_only_layers = {short(dense)} in config.json must list the dense layers "
                    "of mlp_layer_types: fix it"
                )
            self.mlp_layer_types = kinds

    def layer_kind(self, index: int) -> str:
        """Full attention in all layers."""
        return FULL

    def window(self) -> int:
        """Sliding window in tokens."""
        return self.sliding_window

    def layer_heads(self) -> tuple[int, ...] | None:
        """Number of query heads per layer; None if all layers have `num_attention_heads`."""
        heads = set(self.num_attention_heads_per_layer or ())
        if heads <= {self.num_attention_heads}:
            return None
        return tuple(self.num_attention_heads_per_layer or ())

    def rotary_size(self) -> int:
        """Number of dimensions with rotary embedding in sliding-window layers."""
        return self._rotary_size(SLIDING)

    def full_heads(self) -> HeadSizes:
        """Heads of full-attention layers, which differ in their rotary dimensions."""
        return HeadSizes(
            head_dim=self.head_size(),
            num_kv_heads=self.kv_heads(),
            rotary_dim=self._rotary_size(FULL),
        )

    def moe(self) -> MoeConfig:
        """Experts and a shared expert; scores are sigmoids of capped logits."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=listed_dense_layers(self.mlp_layer_types, self.num_hidden_layers, None),
            sigmoid=True,
            has_bias=True,
            scale=self.moe_routed_scaling_factor,
            score_cap=self.moe_router_logit_softcapping or None,
            shared_size=self.shared_expert_intermediate_size,
        )

    def _rotary_size(self, kind: str) -> int:
        share = self.partial_rotary_factor
        return int(self.head_size() * self.rotary_share(kind, 1.0 if share is None else share))


FAMILIES = (LagunaConfig,)
