"""Gemma 3n (huggingface.co/google): four streams of hidden states, of which a layer computes one
and predicts the others (AltUp); low-rank residuals (Laurel); sparse activations in the first MLPs;
per-layer embeddings and shared KV caches as in Gemma 4.

Schema: `config/vendors/google.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import torch

from kernels import fused_add_norm, gelu_and_mul
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.gemma4 import SharingModel
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear import ColumnParallelLinear, ColumnPart, build_router
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import RMSNorm
from worker.models.layers.per_layer_embedding import PerLayerBlock, replicated

_LEAST_SQUARE = 1e-5
"""Lower bound of the mean square of a scaled stream (transformers' Gemma3nTextModel)."""


class AltUp:
    """Alternating updates (arXiv 2301.13310): predicts all streams before a layer, and corrects
    them by the layer's change to the active stream.

    Args:
        model: the model that the layer belongs to.
        num_streams: number of streams.
        active: index of the stream that layers compute.
    """

    def __init__(self, model: DecoderModel, num_streams: int, active: int) -> None:
        options, size = model.options, model.config.hidden_size
        self._num_streams, self._active = num_streams, active
        self._batch_invariant = options.batch_invariant
        self._router = build_router(size, {"modality_router": num_streams}, options)
        self._router_norm = RMSNorm(size, model.config.rms_norm_eps, options)
        self._output_scale: torch.Tensor | None = torch.empty(
            size, dtype=options.dtype, device=options.device
        )
        self._scales_output = bool(model.extra("altup_correct_scale"))
        self._prediction, self._correction = (
            torch.empty(count, num_streams, dtype=torch.float32, device=options.device)
            for count in (num_streams**2, num_streams)
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the router, its norm, coefficients and scale; `prefix` ends with a
        dot."""
        yield from self._router.weight_slots(prefix)
        yield from self._router_norm.weight_slots(f"{prefix}router_norm")
        for name, tensor in (
            ("prediction_coefs.weight", self._prediction),
            ("correction_coefs.weight", self._correction),
            ("correct_output_scale", self._output_scale),
        ):
            assert tensor is not None, "slots are listed before weights are processed"
            yield WeightSlot(
                name=f"{prefix}{name}", destination=tensor, full_shape=tuple(tensor.shape)
            )

    def process_after_loading(self) -> None:
        """Packs the router, and folds the factor 1 / hidden size of the router's input into the
        norm."""
        self._router.process_after_loading()
        weight = self._router_norm.weight
        self._router_norm.multiply(weight.new_full((1,), 1 / len(weight), dtype=torch.float32))
        if not self._scales_output:
            self._output_scale = None

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps streams [T, N, hidden] to their predictions [T, N, hidden]."""
        count = self._num_streams
        mixture = self._coefficients(streams[:, self._active], self._prediction)
        mixture = mixture.view(-1, count, count).to(streams.dtype)
        if not self._batch_invariant:
            return torch.baddbmm(streams, mixture, streams)
        predictions = streams
        for stream in range(count):  # elementwise, so that no token depends on others
            predictions = predictions + mixture[:, :, stream, None] * streams[:, stream, None]
        return predictions

    def correct(self, predictions: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Maps predictions [T, N, hidden] and the computed active stream [T, hidden] to corrected
        streams [T, N, hidden]."""
        factors = (self._coefficients(computed, self._correction) + 1.0).to(predictions.dtype)
        innovation = computed - predictions[:, self._active]
        return predictions + innovation[:, None] * factors[:, :, None]

    def block_input(self, streams: torch.Tensor) -> torch.Tensor:
        """The active stream [T, hidden], scaled, which is the input of the PerLayerBlock."""
        active = streams[:, self._active]
        return active if self._output_scale is None else active * self._output_scale

    def _coefficients(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Coefficients fp32 [T, M]: the modalities tanh(router(norm(x))) [T, N] times a weight [M,
        N]."""
        norm = self._router_norm
        (normed,), _ = fused_add_norm(x, None, (norm.norm(is_fp32=True),), norm.eps)
        modalities = self._router.forward(normed).tanh()
        return (modalities[:, None] * weight).sum(-1)


class Laurel:
    """Learned augmented residual (arXiv 2411.07501): x + norm(right(left(x))), of low rank.

    Args:
        config: the model's configuration.
        options: options of the model's layers.
        rank: size between the two projections.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, rank: int) -> None:
        self._left = replicated("linear_left", config.hidden_size, rank, options)
        self._right = replicated("linear_right", rank, config.hidden_size, options)
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the two projections and the norm; `prefix` ends with a dot."""
        yield from self._left.weight_slots(prefix)
        yield from self._right.weight_slots(prefix)
        yield from self._norm.weight_slots(f"{prefix}post_laurel_norm")

    def process_after_loading(self) -> None:
        """Packs the projections after loading."""
        self._left.process_after_loading()
        self._right.process_after_loading()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]."""
        return self._norm.add_to(x, self._right.forward(self._left.forward(x)))


class SparseGelu:
    """GELU of the amount by which gate values exceed a cutoff, 0 below it. The cutoff is a quantile
    of the normal distribution with the mean and variance of all gate values of the token.

    Args:
        sparsity: fraction of normally distributed values below the cutoff.
        size: intermediate size across all ranks.
        options: options of the model's layers.
    """

    def __init__(self, sparsity: float, size: int, options: LayerOptions) -> None:
        self._deviations = NormalDist().inv_cdf(sparsity)
        self._size = size
        self._group, self._fixed_order = options.group, options.batch_invariant

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """Maps gate and up [T, 2 * local size] to [T, local size]."""
        gate, up = both.chunk(2, dim=1)
        wide = gate.float()
        mean = self._mean(wide)
        deviation = self._mean((wide - mean).square()).sqrt()
        kept = torch.relu(wide - (mean + deviation * self._deviations)).to(gate.dtype)
        return gelu_and_mul(torch.cat((kept, up), dim=1))

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Mean [T, 1] over the features [T, local size] of all ranks."""
        if self._group.world_size == 1:
            return x.mean(-1, keepdim=True)
        total = self._group.all_reduce(x.sum(-1, keepdim=True), fixed_order=self._fixed_order)
        return total / self._size


class Gemma3nLayer:
    """A layer that computes one of the streams; all streams are predicted before it and corrected
    after it.

    Args:
        model: the model that the layer belongs to.
        index: 0-based index of the layer.
    """

    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    """Names of the layer's norms in a checkpoint, in the order in which they are applied."""

    def __init__(self, model: Gemma3nForCausalLM, index: int) -> None:
        config, options = model.config, model.options
        self._index, self._active = index, int(model.extra("altup_active_idx"))
        self._attention = model.build_attention(index)
        self.kv_cache_spec = self._attention.kv_cache_spec
        """Specification of the attention's KV cache."""
        self.state_spec = self._attention.state_spec
        """None, since attention keeps no state."""
        self._mlp = model.build_layer_mlp(index)
        self._altup = AltUp(model, int(model.extra("altup_num_inputs")), self._active)
        self._laurel = Laurel(config, options, int(model.extra("laurel_rank")))
        size = int(model.extra("hidden_size_per_layer_input"))
        self._per_layer = PerLayerBlock(config, options, size, gelu_and_mul)
        self._norms = [
            RMSNorm(config.hidden_size, config.rms_norm_eps, options) for _ in self.norm_names
        ]

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self._attention.weight_slots(f"{prefix}self_attn.")
        yield from self._mlp.weight_slots(f"{prefix}mlp.")
        yield from self._altup.weight_slots(f"{prefix}altup.")
        yield from self._laurel.weight_slots(f"{prefix}laurel.")
        yield from self._per_layer.weight_slots(prefix)
        for name, norm in zip(self.norm_names, self._norms, strict=True):
            yield from norm.weight_slots(f"{prefix}{name}")

    def process_after_loading(self) -> None:
        """Packs all blocks after loading."""
        for block in (self._attention, self._mlp, self._altup, self._laurel, self._per_layer):
            block.process_after_loading()

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps streams [T, N, hidden] to streams [T, N, hidden], or [S, N, hidden] for the tokens
        in `logits_indices`. There is no residual; other arguments are as in DecoderLayer."""
        assert ctx.per_layer is not None, "the model computes them"
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        predictions, embedded = self._altup.predict(hidden), ctx.per_layer[:, self._index]
        normed = before_attention.forward(predictions[:, self._active])
        attended = self._attention.forward(normed, positions, ctx, logits_indices)
        if logits_indices is not None:
            predictions, normed, embedded = (
                x.index_select(0, logits_indices) for x in (predictions, normed, embedded)
            )
            if not len(logits_indices):
                return predictions, None
        total = after_attention.add_to(predictions[:, self._active], attended)
        total = (total + self._laurel.forward(normed)) * 0.5**0.5
        computed = after_mlp.add_to(total, self._mlp.forward(before_mlp.forward(total)))
        streams = self._altup.correct(predictions, computed)
        added = self._per_layer.forward(self._altup.block_input(streams), embedded)
        streams[:, 1:].add_(added[:, None])
        return streams, None


class Gemma3nForCausalLM(SharingModel):
    """Gemma 3n: sliding-window and full-attention layers on several streams of hidden states."""

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        super().__init__(config, options, max_model_len)
        size, others = config.hidden_size, range(int(self.extra("altup_num_inputs")) - 1)
        parts = [
            ColumnPart(name=f"altup_projections.{other}", full_size=size, local_size=size, start=0)
            for other in others
        ]
        self._to_streams = ColumnParallelLinear(size, parts, bias=False, options=options)
        self._from_streams = [
            replicated(f"altup_unembed_projections.{other}", size, size, options)
            for other in others
        ]

    def build_layer(self, index: int) -> Gemma3nLayer:
        """Builds a layer; layers differ only in windows, rotary tables, caches and activations."""
        return Gemma3nLayer(self, index)

    def build_layer_mlp(self, index: int) -> GatedMLP:
        """Builds the MLP of a layer, which may have sparse activations."""
        sparsity = float(self.extra("activation_sparsity_pattern")[index])
        if not sparsity:
            return self.build_mlp()
        activate = SparseGelu(sparsity, self.config.intermediate_size, self.options)
        return GatedMLP(self.config, self.options, activate=activate)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        yield from super().weight_slots()
        for projection in (self._to_streams, *self._from_streams):
            yield from projection.weight_slots("model.")

    def process_after_loading(self) -> None:
        """Packs the loaded weights."""
        super().process_after_loading()
        for projection in (self._to_streams, *self._from_streams):
            projection.process_after_loading()

    def run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps the first layer's input to streams [T, N, hidden] and runs all layers on them;
        arguments and result as in DecoderModel."""
        streams, _ = super().run_layers(self._spread(hidden), positions, ctx)
        return (self._merged(streams) if len(streams) else streams[:, 0]), None

    def _spread(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps embeddings [T, hidden] to streams [T, N, hidden] of equal magnitude."""
        others = self._to_streams.forward(hidden).view(len(hidden), -1, hidden.shape[-1])
        return torch.cat((hidden[:, None], _scaled_like(others, hidden[:, None])), dim=1)

    def _merged(self, streams: torch.Tensor) -> torch.Tensor:
        """Mean [T, hidden] of the streams [T, N, hidden], each scaled to the magnitude of the first
        one."""
        first, *others = streams.unbind(1)
        projected = [
            projection.forward(stream)
            for projection, stream in zip(self._from_streams, others, strict=True)
        ]
        scaled = _scaled_like(torch.stack(projected, dim=1), first[:, None])
        return (first + scaled.sum(1)) / streams.shape[1]


def _scaled_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x [..., hidden], scaled to the root mean squares of `like` [..., hidden], whose leading
    dimensions may be 1."""
    wanted, own = (y.float().square().mean(-1, keepdim=True) for y in (like, x))
    return (x * (wanted.sqrt() / own.clamp(min=_LEAST_SQUARE).sqrt())).to(x.dtype)
