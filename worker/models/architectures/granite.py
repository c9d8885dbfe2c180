"""Granite (huggingface.co/ibm-granite) and MiniCPM (huggingface.co/openbmb): Llama with scaled
embeddings, blocks and logits; dense, or with experts.

Schemas: `config/vendors/ibm.py` and `config/vendors/openbmb.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from worker.models.architectures.decoder import DecoderModel, FeedForward
from worker.models.architectures.llama import LlamaLayer, PreNormLayer
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import AttentionTraits, GatedMLP
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.mamba import Mamba2
from worker.models.layers.moe import MoeMLP, MoeNames, StackedNames
from worker.models.layers.norms import RMSNorm
from worker.models.layers.rope import cos_sin_table

_NAMES = MoeNames(
    router="router.layer",
    stacked=StackedNames(gate_up="input_linear.weight", down="output_linear.weight"),
)
_SWA_NAMES = MoeNames(router="router", stacked=StackedNames())
_FUSED_NAMES = ("input_linear", "input_linear", "output_linear")
_MINICPM_NAMES = MoeNames(gate="w1", up="w3", down="w2")


class GraniteLayer(LlamaLayer):
    """A layer with scaled blocks: x + m * attention(norm(x)), then x + m * mlp(norm(x)). Norms that
    add a block's output to the residual multiply it by m, the `residual_multiplier`."""

    def __init__(
        self,
        model: DecoderModel,
        index: int,
        mlp: FeedForward,
        mlp_name: str = "mlp",
        *,
        rotates: bool = True,
    ) -> None:
        traits = AttentionTraits(
            scale=float(model.extra("attention_multiplier")),
            rotates=rotates,
            has_sinks=model.config.has_sinks,
        )
        super().__init__(model, index, mlp, traits=traits, mlp_name=mlp_name)


class GraniteForCausalLM(DecoderModel):
    """Dense Granite 3: embeddings are multiplied by `embedding_multiplier`, logits are divided by
    `logits_scaling`."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer; all layers have the same structure."""
        return GraniteLayer(self, index, GatedMLP(self.config, self.options))

    def build_norm(self) -> RMSNorm:
        """Builds a norm that scales a block's output before adding it to the residual."""
        scale = float(self.extra("residual_multiplier"))
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        return RMSNorm(size, eps, self.options, block_scale=scale)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to the first layer's input [T, hidden]."""
        return super().embed(input_ids) * float(self.extra("embedding_multiplier"))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from the hidden states [R, hidden] of the rows to
        sample."""
        return super().compute_logits(hidden) / float(self.extra("logits_scaling"))


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3 with experts. Its softmax over the chosen experts is computed as a softmax over all
    experts, renormalized over the chosen ones."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; all layers have the same structure."""
        mlp = MoeMLP(self.config, self.options, _NAMES)
        return GraniteLayer(self, index, mlp, "block_sparse_moe")


class GraniteMoeSharedForCausalLM(GraniteForCausalLM):
    """Granite with experts and an optional shared MLP."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; all layers have the same structure."""
        return GraniteLayer(self, index, *build_experts(self))


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """Granite with sliding windows and attention sinks; the rotary base differs between layers,
    some of which may have no rotary embedding."""

    def build_layer(self, index: int) -> GraniteLayer:
        """Builds a layer; layers differ only in windows and rotary tables."""
        mlp, name = self.build_mlp()
        return GraniteLayer(self, index, mlp, name, rotates=self._thetas[index] > 0)

    def build_mlp(self) -> tuple[FeedForward, str]:
        """The feed-forward block and its checkpoint name within the layer."""
        return GatedMLP(self.config, self.options), "mlp"

    def rotary_table(self, index: int) -> torch.Tensor:
        """Cosines and sines [positions, rotary_dim] of a layer; layers without rotary embedding do
        not read theirs."""
        return self._tables.get(self._thetas[index], self.cos_sin)

    @property
    def _thetas(self) -> list[float]:
        """Base of each layer's rotary embedding; 0 for a layer without rotary embedding."""
        return list(map(float, self.extra("layer_rope_theta")))

    @cached_property
    def _tables(self) -> dict[float, torch.Tensor]:
        """Rotary tables (cosines and sines), keyed by base."""
        rope, size = self.config.rope, self.config.rotary_dim
        return {
            theta: cos_sin_table(
                replace(rope, theta=theta), size, len(self.cos_sin), self.options.device
            )
            for theta in set(self._thetas) - {0.0}
        }


class GraniteMoeSWAForCausalLM(GraniteSWAForCausalLM):
    """Granite SWA with experts and an optional shared MLP."""

    def build_mlp(self) -> tuple[FeedForward, str]:
        """The feed-forward block and its checkpoint name within the layer."""
        return build_experts(self, _SWA_NAMES)


class SharedExperts:
    """Experts and an MLP whose outputs are added; a single all-reduce sums the two over the ranks.

    Args:
        config: the model's configuration, with experts.
        options: options of the model's layers.
        shared_size: intermediate size of the MLP.
        names: names of the MoE block's weights in a checkpoint.
    """

    needs_fp32: ClassVar[bool] = True

    def __init__(
        self, config: ModelConfig, options: LayerOptions, shared_size: int, names: MoeNames
    ) -> None:
        self._experts = MoeMLP(config, options, names)
        self._shared = GatedMLP(config, options, shared_size, names=_FUSED_NAMES)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the experts and the MLP; `prefix` is the layer's and ends with a dot."""
        yield from self._experts.weight_slots(f"{prefix}block_sparse_moe.")
        yield from self._shared.weight_slots(f"{prefix}shared_mlp.")

    def process_after_loading(self) -> None:
        """Packs the experts and the MLP after loading."""
        self._experts.process_after_loading()
        self._shared.process_after_loading()

    def forward(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]. The router reads `fp32_input`, the same
        input in fp32."""
        choice = self._experts.choose(hidden, fp32_input)
        return self._experts.run(hidden, choice, self._shared.forward_share(hidden))


def build_experts(model: DecoderModel, names: MoeNames = _NAMES) -> tuple[FeedForward, str]:
    """Experts, with a shared MLP if `shared_intermediate_size` is not 0, and their checkpoint name
    within the layer. `names` are the names of the MoE block's weights."""
    size = int(model.extra("shared_intermediate_size"))
    if not size:
        return MoeMLP(model.config, model.options, names), "block_sparse_moe"
    return SharedExperts(model.config, model.options, size, names), ""


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4: Mamba-2 in most layers, attention in the others, possibly without rotary
    embedding; a shared MLP, with optional experts."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with Mamba-2 or with attention."""
        mlp, name = self._build_mlp()
        if index in (self.config.linear_layers or ()):
            mixer = Mamba2(self.config, self.options, index)
            return PreNormLayer(self, mixer, mlp, mixer_name="mamba", mlp_name=name)
        assert self.config.rotating is not None, "config.json specifies which layers rotate"
        return GraniteLayer(self, index, mlp, name, rotates=self.config.rotating[index])

    def _build_mlp(self) -> tuple[FeedForward, str]:
        """The feed-forward block and its checkpoint name within the layer."""
        if self.config.moe is None:
            return GatedMLP(self.config, self.options, names=_FUSED_NAMES), "shared_mlp"
        return build_experts(self)


class MiniCPMForCausalLM(GraniteForCausalLM):
    """MiniCPM, with scales translated to Granite's; experts in all layers or in none."""

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer; all layers have the same structure."""
        if self.config.moe is None:
            return super().build_layer(index)
        return GraniteLayer(self, index, MoeMLP(self.config, self.options, _MINICPM_NAMES))
