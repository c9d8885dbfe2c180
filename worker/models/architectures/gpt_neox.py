"""GPT-NeoX and Pythia (huggingface.co/EleutherAI): attention and an ungated MLP as parallel blocks,
each with its own LayerNorm.

Schema: `config/vendors/eleutherai.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels import rowwise
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.stablelm import StableLmForCausalLM
from worker.models.layers.attention import MLP, AttentionNames, AttentionTraits
from worker.models.layers.context import ForwardContext

_NAMES = AttentionNames(
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    output="dense",
    is_grouped=True,
)


class TwoNormLayer(LlamaLayer):
    """A layer with parallel blocks: x + attention(norm(x)) + mlp(norm'(x))."""

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the outputs of attention and MLP, and the residual to which it has yet to be
        added, [T, hidden] each; in the last layer, [S, hidden], for the tokens in `logits_indices`.
        """
        of_attention, of_mlp = self.norms
        if residual is None:
            residual, normed = hidden, of_attention.forward(hidden)
        else:
            normed, residual = of_attention.forward_add(hidden, residual)
        attended = self.attention.forward(normed, positions, ctx, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
            if not len(logits_indices):
                return attended, residual
        return attended + self.mlp.forward(of_mlp.forward(residual)), residual


class GPTNeoXForCausalLM(StableLmForCausalLM):
    """GPT-NeoX: rotary embedding in part of each head; checkpoints have a fused QKV tensor, grouped
    by head."""

    embedding_name: ClassVar[str] = "gpt_neox.embed_in"
    layers_name: ClassVar[str] = "gpt_neox.layers"
    norm_name: ClassVar[str] = "gpt_neox.final_layer_norm"
    head_name: ClassVar[str] = "embed_out"

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer, with parallel or sequential blocks; all layers have the
        same structure."""
        activate = rowwise.gelu if self.extra("hidden_act") == "gelu" else rowwise.gelu_tanh
        names = {"up_name": "dense_h_to_4h", "down_name": "dense_4h_to_h"}
        mlp = MLP(self.config, self.options, activate, **names)
        layer = TwoNormLayer if self.extra("use_parallel_residual") else LlamaLayer
        traits = AttentionTraits(names=_NAMES)
        return layer(self, index, mlp, traits=traits, attention_name="attention")
