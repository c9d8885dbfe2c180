"""BERT (huggingface.co/google-bert), RoBERTa and XLM-RoBERTa (huggingface.co/FacebookAI):
bidirectional encoders.

Schema: `config/encoders.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import rowwise
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import MLP, AttentionNames, AttentionTraits
from worker.models.layers.context import ForwardContext
from worker.models.layers.encoder_attention import EncoderAttention
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import LayerNorm
from worker.models.layers.pooling_head import DenseHead

_NAMES = AttentionNames(q="self.query", k="self.key", v="self.value", output="output.dense")


class BertLayer:
    """A post-norm layer: y = norm(x + attention(x)), then norm(y + mlp(y)).

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    def __init__(self, model: DecoderModel, index: int) -> None:
        self.attention = EncoderAttention(
            *(model.config, model.options),
            layer_index=index,
            cos_sin=model.cos_sin,
            traits=AttentionTraits(names=_NAMES, rotates=False),
        )
        names = {"up_name": "intermediate.dense", "down_name": "output.dense"}
        self.mlp = MLP(model.config, model.options, rowwise.gelu, **names)
        self.kv_cache_spec: KVCacheSpec | None = self.attention.kv_cache_spec
        self.state_spec: StateSpec | None = None
        self.norms = {
            "attention.output.LayerNorm": model.build_norm(),
            "output.LayerNorm": model.build_norm(),
        }

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self.attention.weight_slots(f"{prefix}attention.")
        yield from self.mlp.weight_slots(prefix)
        for name, norm in self.norms.items():
            yield from norm.weight_slots(f"{prefix}{name}")

    def process_after_loading(self) -> None:
        """Packs attention and MLP after loading."""
        self.attention.process_after_loading()
        self.mlp.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the layer, and None instead of a residual; arguments and shapes as in
        DecoderLayer."""
        assert residual is None, "a layer's output includes its input"
        after_attention, after_mlp = self.norms.values()
        attended = self.attention.forward(hidden, positions, ctx, logits_indices)
        if logits_indices is not None:
            hidden = hidden.index_select(0, logits_indices)
        if not len(hidden):
            return hidden, None
        hidden, _ = after_attention.forward_add(attended, hidden)
        return after_mlp.forward_add(self.mlp.forward(hidden), hidden)[0], None


class BertModel(DecoderModel):
    """BERT, RoBERTa and XLM-RoBERTa, which differ in position embeddings and in their heads for
    classification."""

    embedding_name: ClassVar[str] = "embeddings.word_embeddings"
    layers_name: ClassVar[str] = "encoder.layer"
    norm_name: ClassVar[str] = "embeddings.LayerNorm"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        self.first_position = int(self.extra("first_position"))
        """Row of the position embeddings for a prompt's first token."""
        counts = {
            "position_embeddings": int(self.extra("num_positions")),
            "token_type_embeddings": int(self.extra("type_vocab_size")),
        }
        self.tables = {
            name: torch.empty(
                *(count, config.hidden_size), dtype=options.dtype, device=options.device
            )
            for name, count in counts.items()
        }

    def build_layer(self, index: int) -> BertLayer:
        """Builds a layer; all layers have the same structure."""
        return BertLayer(self, index)

    def build_norm(self) -> LayerNorm:
        """A LayerNorm with a bias, used in the layers and after the embedding."""
        config = self.config
        return LayerNorm(config.hidden_size, config.rms_norm_eps, self.options, has_bias=True)

    def build_pooling_head(self) -> DenseHead:
        """The classification head: a linear layer with tanh, which BERT calls `pooler`, and a
        linear output layer."""
        if self.extra("has_pair_types"):
            return DenseHead(self.config, self.options, "pooler.dense", "classifier")
        return DenseHead(self.config, self.options, "classifier.dense", "classifier.out_proj")

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        yield from super().weight_slots()
        for name, table in self.tables.items():
            yield WeightSlot(
                name=f"embeddings.{name}.weight",
                destination=table,
                full_shape=tuple(table.shape),
            )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Maps token ids [T] and positions [T] int64 to hidden states [T, hidden], or [S, hidden]
        for the tokens in the context's `logits_indices`."""
        places, types = self.tables.values()
        added = types[0] if ctx.token_types is None else types.index_select(0, ctx.token_types)
        hidden = self.embed(input_ids) + added
        hidden = hidden + places.index_select(0, positions + self.first_position)
        hidden, _ = self.run_layers(self.norm.forward(hidden), positions, ctx)
        return hidden
