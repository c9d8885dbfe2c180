"""Kimi Linear (huggingface.co/moonshotai): three out of four layers use linear attention (Kimi
Delta Attention, arXiv 2510.26692); the others use latent attention without rotary embedding.

Schema: `config/vendors/moonshot.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

import torch

from kernels import KimiDeltaLayer, KimiGates, kimi_delta_attention, short_convolution
from kernels.states import Inputs, StateRows, advance_with_drafts
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.deepseek import LatentAttention
from worker.models.architectures.llama import Mixer, PreNormLayer
from worker.models.architectures.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec
from worker.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    divided_part,
    whole_part,
)
from worker.models.layers.linear_method import WeightSlot
from worker.models.layers.moe import MoeNames
from worker.models.layers.sharing import divide

_PARTS: Final = ("q", "k", "v")
"""Names of the projections that have a short convolution."""


class KimiDeltaAttention:
    """Kimi Delta Attention (KDA), a linear attention: short convolutions over queries, keys and
    values, then the delta rule with a decay per key dimension. Decays and output gates are low-rank
    projections of the hidden state.

    Each rank computes its share of the heads.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.

    Raises:
        ValueError: the ranks cannot share the heads evenly.
    """

    def __init__(self, model: DecoderModel, index: int) -> None:
        config, options = model.config, model.options
        self._layer_index, self._options = index, options
        head_dim, num_taps = model.extra("linear_head_dim"), model.extra("linear_conv_kernel_dim")
        self._all_heads = int(model.extra("linear_num_heads"))
        num_heads = divide(self._all_heads, options.group.world_size, "the number of linear heads")
        width, all_width = num_heads * head_dim, self._all_heads * head_dim
        self.kv_cache_spec: KVCacheSpec | None = None
        """None, since linear attention keeps no keys and values."""
        self.state_spec: StateSpec | None = StateSpec(
            planes=(
                StatePlane((num_taps - 1, len(_PARTS) * width), options.dtype),
                StatePlane((num_heads, head_dim, head_dim), torch.float32),
            ),
            inputs=(
                StatePlane((len(_PARTS) * width + num_heads,), options.dtype),
                StatePlane((width,), options.dtype),
            ),
        )
        """Specification of the layer's state per request: last inputs of the convolutions, and the
        recurrent state. The recurrence's inputs are queries, keys, values, step sizes and
        decays."""
        parts = [
            *(divided_part(f"{part}_proj", all_width, options) for part in _PARTS),
            divided_part("b_proj", self._all_heads, options),
            whole_part("f_a_proj", head_dim),
            whole_part("g_a_proj", head_dim),
        ]
        self._widths = [len(_PARTS) * width, num_heads, head_dim, head_dim]
        """Widths of the fused projection's outputs, in order: queries, keys and values; step sizes;
        inputs of the decays; inputs of the gates."""
        self._input = ColumnParallelLinear(
            config.hidden_size, parts, bias=False, options=options, supports_lora=True
        )
        self._decay, self._gate = (
            ColumnParallelLinear(
                head_dim,
                [divided_part(name, all_width, options)],
                bias=False,
                options=options,
                supports_lora=True,
            )
            for name in ("f_b_proj", "g_b_proj")
        )
        self._output = RowParallelLinear(
            all_width, config.hidden_size, bias=False, options=options, supports_lora=True
        )
        self._conv = torch.empty(
            len(_PARTS) * width, num_taps, dtype=options.dtype, device=options.device
        )
        rate, bias, norm = (
            torch.empty(size, dtype=torch.float32, device=options.device)
            for size in (num_heads, width, head_dim)
        )
        self._layer = KimiDeltaLayer(
            log_rate=rate, step_bias=bias, norm=norm, eps=config.rms_norm_eps
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the projections, the convolutions, the decays and the norm; `prefix` ends
        with a dot."""
        for projection in (self._input, self._decay, self._gate):
            yield from projection.weight_slots(prefix)
        yield from self._output.weight_slots(f"{prefix}o_proj")
        group, layer = self._options.group, self._layer
        num_heads, width = len(layer.log_rate), len(layer.step_bias)
        for part, weight in zip(_PARTS, self._conv.split(width), strict=True):
            yield WeightSlot(
                name=f"{prefix}{part}_conv1d.weight",
                destination=weight.unsqueeze(1),
                full_shape=(width * group.world_size, 1, weight.shape[1]),
                start=group.rank * width,
            )
        yield WeightSlot(
            name=f"{prefix}A_log",
            destination=layer.log_rate.view(1, 1, -1, 1),
            full_shape=(1, 1, self._all_heads, 1),
            dim=2,
            start=group.rank * num_heads,
        )
        yield WeightSlot(
            name=f"{prefix}dt_bias",
            destination=layer.step_bias,
            full_shape=(width * group.world_size,),
            start=group.rank * width,
        )
        yield WeightSlot(
            name=f"{prefix}o_norm.weight", destination=layer.norm, full_shape=layer.norm.shape
        )

    def process_after_loading(self) -> None:
        """Packs the projections after loading, and transposes the weights of the convolutions."""
        for projection in (self._input, self._decay, self._gate, self._output):
            projection.process_after_loading()
        self._conv = torch.stack(self._conv.unbind(1))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden], or [S, hidden] for the tokens in
        `logits_indices`. Updates the states of all rows."""
        rows, states = ctx.state_rows, ctx.states[self._layer_index]
        assert rows is not None, "a step of a model that keeps states"
        widths = self._widths
        own, decay, gate = self._input.forward(hidden).split(
            [widths[0] + widths[1], *widths[2:]], dim=1
        )
        gate = self._gate.forward(gate)

        def advance(inputs: Inputs, step: StateRows) -> torch.Tensor:
            mixed, share = inputs[0].split(widths[:2], dim=1)
            mixed = short_convolution(mixed, self._conv, None, states.conv, step, has_silu=True)
            # Outputs of replayed tokens are not used, so any gates of the same shape will do.
            gates = KimiGates(inputs[1], share, gate if step is rows else inputs[1])
            by_position = self._options.batch_invariant
            return kimi_delta_attention(
                *(mixed, gates, self._layer, states.recurrent, step), by_position=by_position
            )

        out = advance_with_drafts([own, self._decay.forward(decay)], states, rows, advance)
        return self._output.forward(
            out if logits_indices is None else out.index_select(0, logits_indices)
        )


class KimiLinearForCausalLM(Qwen3MoeForCausalLM):
    """Kimi Linear: experts as in DeepSeek V3 in all but the first few layers."""

    moe_names: ClassVar[MoeNames] = MoeNames(
        gate="w1", up="w3", down="w2", bias="gate.e_score_correction_bias"
    )

    def build_layer(self, index: int) -> PreNormLayer:
        """Builds a layer with linear or latent attention, and with experts or an MLP."""
        linear, moe = self.config.linear_layers, self.config.moe
        assert linear is not None, "the architecture has linear attention"
        assert moe is not None, "the architecture has experts"
        is_linear = index in linear
        mixer: Mixer = (
            KimiDeltaAttention(self, index) if is_linear else LatentAttention.of(self, index)
        )
        return PreNormLayer(
            *(self, mixer, self.build_mlp(index)),
            mixer_name="self_attn",
            mlp_name="mlp" if index in moe.dense_layers else "block_sparse_moe",
        )
