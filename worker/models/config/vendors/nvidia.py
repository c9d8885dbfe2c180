"""Schemas of Nemotron 4, Minitron, Nemotron-H and Nemotron 3 (huggingface.co/nvidia). Does not
import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from worker.models.config.family import FULL, LINEAR, FamilyConfig
from worker.models.config.mamba_config import MambaConfig, checked_mamba
from worker.models.config.moe_config import MoeConfig, grouped_experts
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    No,
    Number,
    RawConfig,
    only,
    short,
    words,
)


class NemotronConfig(FamilyConfig):
    """Nemotron 4: LayerNorm and an ungated MLP."""

    architecture = "NemotronForCausalLM"
    model_types = ("nemotron",)
    implementation = "nemotron:NemotronForCausalLM"

    max_position_embeddings: Count = 4096
    norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.5
    eos_token_id: Any = 3
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["relu2"] = "relu2"

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.norm_eps


_PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Layer types by their letter in `hybrid_override_pattern`."""


class NemotronHConfig(FamilyConfig):
    """Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts."""

    architecture = "NemotronHForCausalLM"
    model_types = ("nemotron_h",)
    implementation = "nemotron_h:NemotronHForCausalLM"
    layer_kinds = (FULL, LINEAR, "mlp", "moe")
    kind_aliases: ClassVar[dict[str, str]] = {"attention": FULL, "mamba": LINEAR}
    aliases = (("attention_head_dim", "head_dim"), ("layers_block_type", "layer_types"))
    skipped = ("mtp.",)
    harmless = ROUTER_KEYS | words(
        """
        chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap num_logits_to_keep
        num_nextn_predict_layers rescale_prenorm_residual time_step_floor time_step_max
        time_step_min time_step_rank use_mamba_kernels
        """
    )

    hybrid_override_pattern: str | None = None
    mtp_hybrid_override_pattern: str | None = None
    """Types of the blocks of the MTP head, as in `hybrid_override_pattern`."""
    mtp_layers_block_type: list[str] | None = None
    """Types of the blocks of the MTP head, as a list; by default, attention and experts."""
    head_dim: Count | None = 128
    num_key_value_heads: Count | None = 8
    intermediate_size: Count = 21504
    max_position_embeddings: Count = 4096
    layer_norm_epsilon: Number = 1e-5
    norm_eps: Number | None = None
    """Alternative name of `layer_norm_epsilon`; checkpoints may have both keys."""
    eos_token_id: Any = 2
    mlp_bias: bool = False
    mlp_hidden_act: Literal["relu2"] = "relu2"
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    n_groups: Count = 8
    ssm_state_size: Count = 128
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    mamba_proj_bias: No = False
    residual_in_fp32: No = False
    time_step_limit: list[Any] | None = None
    n_routed_experts: Count = 8
    num_experts_per_tok: Count = 2
    moe_intermediate_size: Count = 7688
    n_shared_experts: Annotated[int, only(1)] = 1
    moe_shared_expert_intermediate_size: Count = 7688
    moe_latent_size: Count | None = None
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 1.0

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with the number of layers, which may be derived from the list of layer
        types."""
        keys = super().prepare(raw)
        kinds = keys.get("layer_types") or keys.get("hybrid_override_pattern")
        if isinstance(kinds, list | str):
            keys.setdefault("num_hidden_layers", len(kinds))
        elif "num_hidden_layers" not in keys:
            raise ValueError(
                "layers_block_type is missing from config.json: add it; it must be a list of layer "
                "types"
            )
        return keys

    def derive(self) -> None:
        """Sets the types of layers and the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_epsilon
        if self.norm_eps not in (None, self.layer_norm_epsilon):
            raise ValueError(
                f"norm_eps = {self.norm_eps} in config.json must equal layer_norm_epsilon "
                f"({self.layer_norm_epsilon}): remove it"
            )
        if self.layer_types is not None:
            return
        pattern, count = self.hybrid_override_pattern, self.num_hidden_layers
        if pattern is None:
            raise ValueError(
                "hybrid_override_pattern is missing from config.json: add it, or "
                f"layers_block_type, with an entry for each of the {count} layers"
            )
        if len(pattern) != count or set(pattern) - set(_PATTERN):
            raise ValueError(
                f"hybrid_override_pattern = {short(pattern)} in config.json is not supported: it "
                f"must have one of {', '.join(_PATTERN)} for each of the {count} layers"
            )
        self.layer_types = [_PATTERN[letter] for letter in pattern]

    def mamba(self) -> MambaConfig:
        """Mamba-2 layers, whose output is gated before the norm."""
        config = MambaConfig(
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            num_groups=self.n_groups,
            state_dim=self.ssm_state_size,
            num_taps=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            input_bias=self.use_bias,
            output_bias=self.use_bias,
        )
        return checked_mamba(config, "mamba_num_heads", "n_groups", self.time_step_limit)

    def moe(self) -> MoeConfig | None:
        """DeepSeek V3's routing, with a shared expert of a different size; None if no layer has
        experts."""
        kinds = enumerate(self.kinds_of_layers())
        others = frozenset(index for index, kind in kinds if kind != "moe")
        if len(others) == self.num_hidden_layers:
            return None
        shared = self.moe_shared_expert_intermediate_size
        return replace(grouped_experts(self, others), shared_size=shared)

    def mtp(self) -> MtpConfig | None:
        """The MTP head, which consists of one attention block and blocks without a cache; None if
        there are other blocks."""
        kinds = self._head_kinds()
        experts = {"moe"} if self.moe() is not None else set()
        if kinds.count(FULL) != 1 or set(kinds) - {FULL, "mlp"} - experts:
            return None
        first, last = "mtp.layers.0.", f"mtp.layers.{len(kinds) - 1}."
        return MtpConfig(
            layer="mtp.layers.",
            embedding_norm=f"{first}enorm",
            hidden_norm=f"{first}hnorm",
            projection=f"{first}eh_proj",
            final_norm=f"{last}final_layernorm",
            zeroes_first=False,
        )

    def extra(self) -> dict[str, Any]:
        """Types of the layers and of the head's blocks, and the experts' latent size."""
        return {
            "layer_kinds": self.kinds_of_layers(),
            "head_kinds": self._head_kinds(),
            "moe_latent_size": self.moe_latent_size,
        }

    def _head_kinds(self) -> tuple[str, ...]:
        """Types of the head's blocks; empty if config.json has none or has unknown ones."""
        letters, kinds = self.mtp_hybrid_override_pattern, self.mtp_layers_block_type
        if kinds is None:
            kinds = [_PATTERN.get(letter, "") for letter in ("*E" if letters is None else letters)]
        kinds = [self.kind_aliases.get(kind, kind) for kind in kinds]
        return () if set(kinds) - set(self.layer_kinds) else tuple(kinds)


FAMILIES = (NemotronConfig, NemotronHConfig)
