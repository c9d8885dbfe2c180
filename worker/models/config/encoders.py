"""Schemas of bidirectional encoders, which are served as pooling models only. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.schema import Count, Index, No, Number, only, words


class BertConfig(FamilyConfig):
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
    base: ClassVar[str] = "bert."
    """Prefix of tensors' names in checkpoints with a head."""

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
        """Row of the position table of a prompt's first token."""
        return 0

    def extra(self) -> dict[str, Any]:
        """Sizes of the embeddings."""
        return {
            "num_positions": self.first_position + self.max_position_embeddings,
            "first_position": self.first_position,
            "type_vocab_size": self.type_vocab_size,
        }


class RobertaConfig(BertConfig):
    """RoBERTa: BERT with positions that begin after the padding token's."""

    architecture = "RobertaModel"
    model_types = ("roberta",)
    base = "roberta."

    pad_token_id: Index = 1
    type_vocab_size: Count = 1

    def derive(self) -> None:
        """Sets the epsilon of norms, and the number of positions that prompts can have."""
        super().derive()
        if self.max_position_embeddings <= self.first_position:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} in config.json must be "
                f"more than pad_token_id + 1, {self.first_position}: fix it"
            )
        self.max_position_embeddings -= self.first_position

    @property
    def first_position(self) -> int:
        """Positions begin after that of padding."""
        return self.pad_token_id + 1


class XLMRobertaConfig(RobertaConfig):
    """XLM-RoBERTa: RoBERTa with a multilingual vocabulary."""

    architecture = "XLMRobertaModel"
    model_types = ("xlm-roberta",)


ENCODERS: dict[str, type[BertConfig]] = {
    family.architecture: family for family in (BertConfig, RobertaConfig, XLMRobertaConfig)
}
"""Encoders by the name of their class without a head."""
