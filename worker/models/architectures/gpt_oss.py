"""gpt-oss (huggingface.co/openai): attention sinks, and experts with biases and clamped gates.

Schema: `config/vendors/openai.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from kernels import (
    Activation,
    BlockScales,
    ExpertBiases,
    Experts,
    ExpertWeights,
    Routing,
    choose_experts,
    fused_moe,
    pack_quantized_experts,
)
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.config.model_config import ModelConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.quantization import GptOssMxfp4Config
from worker.models.layers.attention import AttentionTraits
from worker.models.layers.expert_share import ExpertShare, share_experts
from worker.models.layers.linear import build_router
from worker.models.layers.linear_method import LayerOptions, WeightSlot

_BLOCK = 32
"""Number of MXFP4 values that share a scale."""
_BIAS = 127
"""Exponent bias of stored scales (E8M0)."""
_DRAWN_EXPONENT = 120
"""Exponent of dummy scales, chosen so that dummy weights are about as large as in other layers."""


class GptOssForCausalLM(DecoderModel):
    """gpt-oss: alternating sliding-window and full-attention layers, with attention sinks and
    experts."""

    def build_layer(self, index: int) -> LlamaLayer:
        """Builds a layer; layers differ only in windows."""
        moe = self.config.moe
        assert moe is not None, "the architecture has experts"
        activation = (float(self.extra("swiglu_alpha")), float(self.extra("swiglu_limit")))
        mlp = GptOssMoe(self.config, moe, self.options, activation)
        return LlamaLayer(self, index, mlp, traits=AttentionTraits(has_sinks=True))


class GptOssMoe:
    """Experts with biases and clamped SwiGLU. A checkpoint stores the weights of all experts in
    tensors [experts, in, out], or in MXFP4. Each rank holds either columns of every expert or some
    whole experts (`ExpertShare`).

    Args:
        config: the model's configuration.
        moe: the experts of a layer.
        options: options of the model's layers.
        activation: alpha and limit of the clamped SwiGLU.
    """

    needs_fp32: ClassVar[bool] = True

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        options: LayerOptions,
        activation: tuple[float, float],
    ) -> None:
        self._moe, self._options = moe, options
        self._routing = Routing(top_k=moe.top_k, scoring="softmax of chosen")
        self._share = share = share_experts(moe, options)
        self._activation = Activation("clamped", *activation)
        hidden = config.hidden_size
        quantization = config.quantization
        is_mxfp4 = quantization is not None and isinstance(quantization.weights, GptOssMxfp4Config)
        weights = _Mxfp4Weights if is_mxfp4 else _PlainWeights
        self._weights: _PlainWeights | _Mxfp4Weights | None = weights(moe, share, hidden, options)
        self._experts: Experts
        self._biases = ExpertBiases(
            torch.empty(share.count, 2 * share.size, dtype=options.dtype, device=options.device),
            torch.empty(share.count, hidden, dtype=options.dtype, device=options.device),
        )
        self._router = build_router(hidden, {"router": moe.num_experts}, options, bias=True)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the router and all experts; `prefix` ends with a dot."""
        assert self._weights is not None, "slots exist until the weights are packed"
        yield from self._router.weight_slots(prefix)
        yield from self._weights.slots(f"{prefix}experts.")
        count, size = self._share.count, self._share.size
        dim, start = self._share.cut(1, 2 * self._share.start)
        yield WeightSlot(
            name=f"{prefix}experts.gate_up_proj_bias",
            destination=self._biases.gate_up.view(count, 2, size).transpose(1, 2),
            full_shape=(self._moe.num_experts, 2 * self._moe.intermediate_size),
            dim=dim,
            start=start,
            read_shape=(count, 2 * size),
        )
        yield WeightSlot(
            name=f"{prefix}experts.down_proj_bias",
            destination=self._biases.down,
            full_shape=(self._moe.num_experts, self._biases.down.shape[1]),
            start=self._share.first,
        )

    def process_after_loading(self) -> None:
        """Packs the router and the experts after loading."""
        assert self._weights is not None, "packed twice"
        self._router.process_after_loading()
        self._experts = self._weights.pack()
        if self._options.group.rank and not self._share.is_whole:
            self._biases.down.zero_()  # only rank 0 adds it before the all-reduce
        self._weights = None

    def forward(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]. The router reads `fp32_input`, the same
        input in fp32."""
        scores = self._router.forward(hidden.float() if fp32_input is None else fp32_input)
        out = fused_moe(
            *(hidden, self._experts, choose_experts(scores, None, self._routing)),
            biases=self._biases,
            activation=self._activation,
            first_expert=self._share.first,
            batch_invariant=self._options.batch_invariant,
        )
        group = self._options.group
        if group.world_size > 1:
            out = group.all_reduce(out, fixed_order=self._options.batch_invariant)
        return out


class _PlainWeights:
    """Unquantized weights of a rank's share of the experts; in a checkpoint, columns of gate and up
    are interleaved."""

    def __init__(
        self, moe: MoeConfig, share: ExpertShare, hidden: int, options: LayerOptions
    ) -> None:
        self._moe, self._share = moe, share
        self._gate_up, self._down = (
            torch.empty(share.count, *shape, dtype=options.dtype, device=options.device)
            for shape in ((2, share.size, hidden), (hidden, share.size))
        )

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        count, _, size, hidden = self._gate_up.shape
        experts, columns = self._moe.num_experts, self._moe.intermediate_size
        dim, start = self._share.cut(2, 2 * self._share.start)
        yield WeightSlot(
            name=f"{prefix}gate_up_proj",
            destination=self._gate_up.permute(0, 3, 2, 1),
            full_shape=(experts, hidden, 2 * columns),
            dim=dim,
            start=start,
            read_shape=(count, hidden, 2 * size),
        )
        dim, start = self._share.cut(1, self._share.start)
        yield WeightSlot(
            name=f"{prefix}down_proj",
            destination=self._down.transpose(1, 2),
            full_shape=(experts, columns, hidden),
            dim=dim,
            start=start,
        )

    def pack(self) -> Experts:
        return Experts(ExpertWeights(self._gate_up.flatten(1, 2)), ExpertWeights(self._down))


class _Mxfp4Weights:
    """MXFP4 weights of a rank's share of the experts, output features first; on CPU they are
    dequantized when packed."""

    def __init__(
        self, moe: MoeConfig, share: ExpertShare, hidden: int, options: LayerOptions
    ) -> None:
        size = share.size
        if hidden % _BLOCK or size % _BLOCK:
            raise ValueError(
                f"--tensor-parallel-size {options.group.world_size} leaves {size} columns of each "
                f"expert per rank, but MXFP4 requires a multiple of {_BLOCK}: use a smaller "
                "--tensor-parallel-size"
            )
        self._moe, self._share = moe, share
        self._dtype = options.dtype
        self._gate_up, self._down = (
            (
                torch.empty(*shape, _BLOCK // 2, dtype=torch.uint8, device=options.device),
                torch.empty(shape, dtype=torch.uint8, device=options.device),
            )
            for shape in (
                (share.count, 2, size, hidden // _BLOCK),
                (share.count, hidden, size // _BLOCK),
            )
        )

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        experts, columns = self._moe.num_experts, self._moe.intermediate_size
        dim, start = self._share.cut(1, 2 * self._share.start)
        for name, tensor in zip(("blocks", "scales"), self._gate_up, strict=True):
            count, _, size, *rest = tensor.shape
            yield WeightSlot(
                name=f"{prefix}gate_up_proj_{name}",
                destination=tensor.transpose(1, 2),
                full_shape=(experts, 2 * columns, *rest),
                dim=dim,
                start=start,
                source_types=("U8",),
                fill_dummy=self._fill_exponents if name == "scales" else None,
                read_shape=(count, 2 * size, *rest),
            )
        dim, start = self._share.cut(2, self._share.start // _BLOCK)
        for name, tensor in zip(("blocks", "scales"), self._down, strict=True):
            _, hidden, _, *rest = tensor.shape
            yield WeightSlot(
                name=f"{prefix}down_proj_{name}",
                destination=tensor,
                full_shape=(experts, hidden, columns // _BLOCK, *rest),
                dim=dim,
                start=start,
                source_types=("U8",),
                fill_dummy=self._fill_exponents if name == "scales" else None,
            )

    @staticmethod
    def _fill_exponents(scales: torch.Tensor) -> None:
        scales.fill_(_DRAWN_EXPONENT)

    def pack(self) -> Experts:
        gate_up, down = self._gate_up, self._down
        return Experts(
            self._packed(gate_up[0].flatten(1, 2), gate_up[1].flatten(1, 2)), self._packed(*down)
        )

    def _packed(self, blocks: torch.Tensor, scales: torch.Tensor) -> ExpertWeights:
        """Packs weights from bytes [experts, rows, blocks, 16] and exponents [experts, rows,
        blocks]."""
        factors = torch.exp2(scales.float() - _BIAS)
        weights = ExpertWeights(
            blocks.flatten(2), BlockScales(factors, _BLOCK, offset=0, code="e2m1")
        )
        return pack_quantized_experts(weights, self._dtype)
