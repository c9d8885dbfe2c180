"""Llama's layers, shared by Mistral, Qwen2, Qwen3 and SDAR, which differ in biases and QK norm.

Schema of Llama: `config/vendors/meta.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol, runtime_checkable

import torch

from kernels import Fp8Inputs
from worker.models.architectures.decoder import (
    DecoderModel,
    FeedForward,
    Fp8FeedForward,
    Module,
)
from worker.models.layers.attention import Attention, AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import KVCacheSpec, StateSpec
from worker.models.layers.linear import Rows
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.norms import HiddenNorm


class Mixer(Module, Protocol):
    """Sequence mixer of a layer: attention, linear attention, Mamba-2 or a short convolution."""

    kv_cache_spec: KVCacheSpec | None
    """Specification of the mixer's KV cache; None if there is none."""
    state_spec: StateSpec | None
    """Specification of the mixer's state per request; None if there is none."""

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`."""
        ...


@runtime_checkable
class Fp8Mixer(Mixer, Protocol):
    """Sequence mixer whose input may be quantized to FP8."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        ...

    def forward(
        self,
        hidden: Rows,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`."""
        ...


class PreNormLayer:
    """A pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
        model: the model that the layer belongs to.
        mixer: sequence mixer, such as attention.
        mlp: feed-forward block.
        mixer_name: checkpoint name of the mixer within the layer; empty if its parts belong
            directly to the layer.
        mlp_name: checkpoint name of the feed-forward block within the layer; empty if its parts
            belong directly to the layer.
    """

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """Names of the layer's norms in a checkpoint, in the order in which they are applied."""

    def __init__(
        self,
        model: DecoderModel,
        mixer: Mixer,
        mlp: FeedForward,
        *,
        mixer_name: str,
        mlp_name: str = "mlp",
    ) -> None:
        self.kv_cache_spec, self.state_spec = mixer.kv_cache_spec, mixer.state_spec
        self.mlp = mlp
        self.norms = [model.build_norm() for _ in self.norm_names]
        self._needs_fp32 = mlp.needs_fp32
        self._mixer = mixer
        self._fp8_mixer: tuple[Fp8Mixer, Fp8Inputs] | None = None
        self._fp8_mlp: tuple[Fp8FeedForward, Fp8Inputs] | None = None
        """The feed-forward block and its FP8 input format if the preceding norm quantizes its
        output; None for other blocks and until the weights are packed."""
        self._mixer_name, self._mlp_name = mixer_name, mlp_name

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self._mixer.weight_slots(_within(prefix, self._mixer_name))
        yield from self.mlp.weight_slots(_within(prefix, self._mlp_name))
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            yield from norm.weight_slots(f"{prefix}{name}")

    def process_after_loading(self) -> None:
        """Packs mixer and feed-forward block after loading."""
        mixer, mlp = self._mixer, self.mlp
        mixer.process_after_loading()
        mlp.process_after_loading()
        if isinstance(mixer, Fp8Mixer) and mixer.fp8_inputs is not None:
            self._fp8_mixer = mixer, mixer.fp8_inputs
        if isinstance(mlp, Fp8FeedForward) and mlp.fp8_inputs is not None:
            self._fp8_mlp = mlp, mlp.fp8_inputs

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the feed-forward block, and the residual to which it has yet to be added;
        arguments and shapes as in DecoderLayer."""
        hidden, residual = self.mix(hidden, residual, positions, ctx, logits_indices)
        return self.after_mixer(hidden, residual) if len(hidden) else (hidden, residual)

    def mix(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the mixer, and the residual to which it has yet to be added; arguments and
        shapes as in DecoderLayer."""
        before, step = self.norms[0], (positions, ctx, logits_indices)
        if self._fp8_mixer is not None and len(hidden) >= self._fp8_mixer[1].min_rows:
            mixer, inputs = self._fp8_mixer
            rows, residual = before.forward_fp8(hidden, residual, inputs)
            hidden = mixer.forward(rows, *step)
        elif residual is None:
            residual, hidden = hidden, self._mixer.forward(before.forward(hidden), *step)
        else:
            hidden, residual = before.forward_add(hidden, residual)
            hidden = self._mixer.forward(hidden, *step)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        return hidden, residual

    def after_mixer(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of `forward`, given the mixer's output and the residual, [T, hidden] each."""
        post_attention_norm = self.norms[1]
        if not self._needs_fp32:
            return self.normed_feed_forward(post_attention_norm, hidden, residual)
        hidden, residual, fp32_input = post_attention_norm.forward_add_with_fp32(hidden, residual)
        return self.feed_forward(hidden, fp32_input), residual

    def normed_feed_forward(
        self,
        norm: HiddenNorm,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        after_block: HiddenNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a block's output to the residual and runs the feed-forward block on the norm of the
        sum; returns the feed-forward output and the sum, [T, hidden] each. Arguments as in
        `HiddenNorm.forward_add`."""
        if self._fp8_mlp is not None and len(hidden) >= self._fp8_mlp[1].min_rows:
            mlp, inputs = self._fp8_mlp
            rows, residual = norm.forward_fp8(hidden, residual, inputs, after_block)
            return mlp.forward(rows), residual
        hidden, residual = norm.forward_add(hidden, residual, after_block)
        return self.feed_forward(hidden), residual

    def feed_forward(
        self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the feed-forward block on normalized hidden states [T, hidden]; `fp32_input` is the
        same input in fp32, for blocks that need it."""
        return self.mlp.forward(hidden, fp32_input)


def _within(prefix: str, name: str) -> str:
    """Tensor-name prefix of a layer's submodule."""
    return f"{prefix}{name}." if name else prefix


class LlamaLayer(PreNormLayer):
    """A pre-norm layer with attention: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
        mlp: feed-forward block.
        traits: how the layer's attention differs from Llama's.
        attention_name: checkpoint name of the attention block within the layer.
        mlp_name: checkpoint name of the feed-forward block within the layer.
    """

    def __init__(
        self,
        model: DecoderModel,
        index: int,
        mlp: FeedForward,
        *,
        traits: AttentionTraits = AttentionTraits(),  # noqa: B008  # frozen
        attention_name: str = "self_attn",
        mlp_name: str = "mlp",
    ) -> None:
        self.attention = Attention(
            *(model.config.for_layer(index), model.options),
            layer_index=index,
            cos_sin=model.rotary_table(index),
            window=model.windows[index],
            traits=traits,
        )
        super().__init__(model, self.attention, mlp, mixer_name=attention_name, mlp_name=mlp_name)


class LlamaForCausalLM(DecoderModel):
    """Llama and similar families: grouped-query attention and an MLP gated by SiLU, with biases and
    QK norm as configured."""

    runs_natively: ClassVar[bool] = True

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; all layers have the same structure."""
        return LlamaLayer(self, index, GatedMLP(self.config, self.options))
