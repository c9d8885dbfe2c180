"""Hunyuan (huggingface.co/tencent). Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from worker.models.config.family import FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, RawConfig, Yes, words


class HunYuanDenseV1Config(FamilyConfig):
    """Hunyuan, dense."""

    architecture = "HunYuanDenseV1ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("hunyuan_v1_dense",)
    implementation = "hunyuan:HunYuanDenseV1ForCausalLM"
    harmless = frozenset({"eod_token_id"})

    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2
    attention_bias: bool = False
    use_qk_norm: Yes = True

    def derive(self) -> None:
        """Replaces `alpha` of dynamic rope scaling by the larger base of the rotary embedding that
        it stands for at all sequence lengths."""
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        table = dict(getattr(self, key) or {})
        alpha, kind = table.pop("alpha", None), table.pop("rope_type", table.pop("type", None))
        if alpha is None:
            return
        dim = self.head_size()
        if type(alpha) not in (int, float) or alpha <= 0 or kind != "dynamic" or dim <= 2:
            raise ValueError(
                f"{key}.alpha {alpha!r:.40} of kind {kind!r:.40} in config.json is not supported: "
                "it must be positive, of kind dynamic; use another checkpoint"
            )
        for without_effect in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            table.pop(without_effect, None)
        theta = float(table.get("rope_theta") or self.rope_theta or 10000.0)
        table.update(rope_type="default", rope_theta=theta * alpha ** (dim / (dim - 2)))
        setattr(self, key, table)


class HunYuanMoEV1Config(HunYuanDenseV1Config):
    """Hunyuan with experts, and a shared one of the same size, in all layers."""

    architecture = "HunYuanMoEV1ForCausalLM"
    model_types = ("hunyuan_v1_moe", "hunyuan")
    implementation = "hunyuan_moe:HunYuanMoEV1ForCausalLM"
    harmless = ROUTER_KEYS | words("eod_token_id cla_share_factor num_experts_per_tok")
    aliases = (("num_local_experts", "num_experts"),)
    top_k_key = "moe_topk"

    num_experts: Count = 1
    moe_topk: Count = 1
    moe_intermediate_size: Index | None = None
    num_shared_expert: Literal[1] = 1
    norm_topk_prob: Yes = True
    use_mixed_mlp_moe: Yes = True

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with one value in place of lists that repeat it for each layer."""
        changes = {
            key: value[0]
            for key in ("moe_topk", "num_shared_expert", "moe_intermediate_size")
            if type(value := raw.get(key)) is list and value and value == value[:1] * len(value)
        }
        return super().prepare({**raw, **changes})

    def moe(self) -> MoeConfig:
        """Experts in all layers."""
        size = self.intermediate_size
        if self.moe_intermediate_size not in (None, size):
            raise ValueError(
                f"moe_intermediate_size {self.moe_intermediate_size} in config.json is not "
                f"supported: it must be intermediate_size ({size})"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.moe_topk,
            intermediate_size=size,
            shared_size=size,
        )


FAMILIES = (HunYuanDenseV1Config, HunYuanMoEV1Config)
