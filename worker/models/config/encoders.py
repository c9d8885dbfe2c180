"""Schemas of bidirectional encoders, which are served as pooling models only. Does not import
torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from worker.models.config.family import FULL, SLIDING, Biases, FamilyConfig
from worker.models.config.schema import Count, Index, No, Number, only, words


class EncoderConfig(FamilyConfig):
    """Base of the encoders' schemas."""

    base: ClassVar[str]
    """Prefix of tensor names in checkpoints that have a head."""
    has_pair_types: ClassVar[bool] = False
    """Whether the family was pretrained on pairs of texts, as BERT was: the second text of a pair
    has a different token type, and the classification head includes the encoder's `pooler`."""


class BertConfig(EncoderConfig):
    """BERT: learned positions, and a LayerNorm after each block."""

    architecture = "BertModel"
    model_types = ("bert",)
    implementation = "bert:BertModel"
    harmless = words(
        """
        classifier_dropout directionality output_past pooler_fc_size pooler_num_attention_heads
        pooler_num_fc_layers pooler_size_per_head pooler_type
        """
    )
    base = "bert."
    has_pair_types = True

    max_position_embeddings: Count = 512
    type_vocab_size: Count = 2
    layer_norm_eps: Number = 1e-12
    hidden_act: Annotated[str, only("gelu")] = "gelu"
    position_embedding_type: Annotated[str, only("absolute")] = "absolute"
    is_decoder: No = False
    add_cross_attention: No = False

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps

    def biases(self) -> Biases:
        """Biases of all projections."""
        return Biases(True, True, True)

    @property
    def first_position(self) -> int:
        """Row of the position table for a prompt's first token."""
        return 0

    def extra(self) -> dict[str, Any]:
        """Sizes of the position and token-type embeddings, `first_position` and
        `has_pair_types`."""
        return {
            "num_positions": self.first_position + self.max_position_embeddings,
            "first_position": self.first_position,
            "type_vocab_size": self.type_vocab_size,
            "has_pair_types": self.has_pair_types,
        }


class RobertaConfig(BertConfig):
    """RoBERTa: BERT with positions that begin after the padding position."""

    architecture = "RobertaModel"
    model_types = ("roberta",)
    base = "roberta."
    has_pair_types = False

    pad_token_id: Index = 1
    type_vocab_size: Count = 1

    def derive(self) -> None:
        """Sets the epsilon of norms, and the maximum number of positions of a prompt."""
        super().derive()
        if self.max_position_embeddings <= self.first_position:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} in config.json must be "
                f"greater than pad_token_id + 1 ({self.first_position}): fix it"
            )
        self.max_position_embeddings -= self.first_position

    @property
    def first_position(self) -> int:
        """Position id of the first token, pad_token_id + 1, as in fairseq's RoBERTa."""
        return self.pad_token_id + 1


class XLMRobertaConfig(RobertaConfig):
    """XLM-RoBERTa: RoBERTa with a multilingual vocabulary."""

    architecture = "XLMRobertaModel"
    model_types = ("xlm-roberta",)


class ModernBertConfig(EncoderConfig):
    """ModernBERT: local attention except in every n-th layer."""

    architecture = "ModernBertModel"
    model_types = ("modernbert",)
    implementation = "modernbert:ModernBertModel"
    aliases = (("global_rope_theta", "rope_theta"), ("norm_eps", "rms_norm_eps"))
    layer_kinds = (FULL, SLIDING)
    window_theta = "local_rope_theta"
    base = "model."
    harmless = words(
        """
        classifier_dropout cls_token_id decoder_bias deterministic_flash_attn embedding_dropout
        initializer_cutoff_factor layer_norm_eps mlp_dropout reference_compile
        repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
        """
    )

    max_position_embeddings: Count = 8192
    rms_norm_eps: Number = 1e-5
    norm_bias: No = False
    attention_bias: No = False
    mlp_bias: No = False
    hidden_activation: Annotated[str, only("gelu")] = "gelu"
    position_embedding_type: Annotated[str, only("absolute", "sans_pos")] = "absolute"
    """Ignored, as in transformers."""
    rope_theta: Number = 160000.0
    local_rope_theta: Number = 10000.0
    local_attention: Count = 128
    global_attn_every_n_layers: Count = 3
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: Annotated[str, only("gelu")] = "gelu"
    classifier_bias: No = False

    def layer_kind(self, index: int) -> str:
        """Full attention in every n-th layer, starting with the first."""
        return SLIDING if index % self.global_attn_every_n_layers else FULL

    def windows(self) -> tuple[int | None, ...]:
        """None for all layers, since windows apply to the KV cache, which encoders do not use."""
        return (None,) * self.num_hidden_layers

    def extra(self) -> dict[str, Any]:
        """Layers with local attention, and the width of their window in tokens."""
        return {
            "local_layers": tuple(kind == SLIDING for kind in self.kinds_of_layers()),
            "local_attention": self.local_attention,
        }


ENCODERS: dict[str, type[EncoderConfig]] = {
    family.architecture: family
    for family in (BertConfig, RobertaConfig, XLMRobertaConfig, ModernBertConfig)
}
"""Encoders, keyed by the name of their class without a head."""
