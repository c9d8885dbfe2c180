"""ModernBERT (huggingface.co/answerdotai): a bidirectional encoder with rotary embedding, local
attention in most layers, and a gated MLP.

Schema: `config/encoders.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import rowwise
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.encoder_attention import EncoderAttention
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import LayerNorm
from worker.models.layers.pooling_head import NormedHead

_NAMES = AttentionNames(q="Wqkv", k="Wqkv", v="Wqkv", output="Wo", is_fused=True)


class ModernBertLayer:
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)). The first layer has no norm
    before attention.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    def __init__(self, model: DecoderModel, index: int) -> None:
        is_local = bool(model.extra("local_layers")[index])
        self._attention = EncoderAttention(
            *(model.config, model.options),
            layer_index=index,
            cos_sin=model.window_cos_sin if is_local else model.cos_sin,
            traits=AttentionTraits(names=_NAMES),
            distance=int(model.extra("local_attention")) // 2 if is_local else None,
        )
        names = ("Wi", "Wi", "Wo")
        self._mlp = GatedMLP(model.config, model.options, activate=_gelu_and_mul, names=names)
        self.kv_cache_spec: KVCacheSpec | None = self._attention.kv_cache_spec
        self.state_spec: StateSpec | None = None
        self._attention_norm = model.build_norm() if index else None
        self._mlp_norm = model.build_norm()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self._attention.weight_slots(f"{prefix}attn.")
        yield from self._mlp.weight_slots(f"{prefix}mlp.")
        if self._attention_norm is not None:
            yield from self._attention_norm.weight_slots(f"{prefix}attn_norm")
        yield from self._mlp_norm.weight_slots(f"{prefix}mlp_norm")

    def process_after_loading(self) -> None:
        """Packs attention and MLP after loading."""
        self._attention.process_after_loading()
        self._mlp.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the MLP, and the residual to which it has yet to be added; arguments and shapes
        as in DecoderLayer."""
        if self._attention_norm is None or residual is None:
            normed, residual = hidden, hidden
        else:
            normed, residual = self._attention_norm.forward_add(hidden, residual)
        attended = self._attention.forward(normed, positions, ctx, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
            if not len(logits_indices):
                return attended, residual
        normed, residual = self._mlp_norm.forward_add(attended, residual)
        return self._mlp.forward(normed), residual


class ModernBertModel(DecoderModel):
    """ModernBERT: a bidirectional encoder with local attention in most layers."""

    embedding_name: ClassVar[str] = "embeddings.tok_embeddings"
    layers_name: ClassVar[str] = "layers"
    norm_name: ClassVar[str] = "final_norm"

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        self._embedding_norm = self.build_norm()

    def build_layer(self, index: int) -> ModernBertLayer:
        """Builds a layer; layers differ in attention and rotary tables."""
        return ModernBertLayer(self, index)

    def build_norm(self) -> LayerNorm:
        """A LayerNorm without a bias."""
        return LayerNorm(self.config.hidden_size, self.config.rms_norm_eps, self.options)

    def build_pooling_head(self) -> NormedHead:
        """The classification head."""
        return NormedHead(self.config, self.options)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        yield from super().weight_slots()
        yield from self._embedding_norm.weight_slots("embeddings.norm")

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to the first layer's input [T, hidden]."""
        return self._embedding_norm.forward(super().embed(input_ids))


def _gelu_and_mul(both: torch.Tensor) -> torch.Tensor:
    """Maps x [T, 2 * I] to gelu(x[:, :I]) * x[:, I:], with the exact GELU."""
    first, second = both.chunk(2, dim=-1)
    return rowwise.gelu(first.contiguous()) * second
