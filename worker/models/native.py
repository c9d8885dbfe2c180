"""Hands a loaded model over to the compiled CPU library, where it can run it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.native import (
    LayerTensors,
    LinearTensors,
    ModelTensors,
    NativeDecoder,
    NativeUnavailable,
)
from worker.models.decoder import DecoderLayer, DecoderModel
from worker.models.layers import GatedMLP
from worker.models.linear import ColumnParallelLinear, RowParallelLinear
from worker.models.linear_method import LayerOptions
from worker.models.llama import LlamaLayer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeOptions:
    """How the compiled library is to run a model."""

    page_size: int
    num_threads: int
    required: bool
    """Whether not to fall back to torch."""


def pack_weights(model: DecoderModel, options: NativeOptions | None) -> None:
    """Brings the weights of a loaded model into the form they are used in.

    Args:
        model: whose weights are all there.
        options: of the compiled library, which gets them where it can run the model; None where
            torch is to.

    Raises:
        ValueError: the library is required but cannot run the model.
    """
    if options is not None:
        model.native = build_native(model, options)
    model.pack()


def build_native(model: DecoderModel, options: NativeOptions) -> NativeDecoder | None:
    """The model in the library's form; None where torch is to run it, with the reason logged.

    Raises:
        ValueError: the library is required but cannot run the model.
    """
    group = model.options.group
    tensors, reason = None, f"{type(model).__name__} is none of the families that it computes"
    if any(model.windows):
        reason = (
            f"layers see {max(model.windows)} positions at a time: --max-model-len "
            f"{min(filter(None, model.windows))} would do without that"
        )
    elif vars(type(model)).get("runs_natively", False):
        tensors = _model_tensors(model)
        reason = tensors.unsupported(options.page_size) or ""
    if tensors is not None and not reason:
        try:
            return NativeDecoder(
                tensors,
                page_size=options.page_size,
                num_threads=options.num_threads,
                all_reduce=None if group.world_size == 1 else _all_reduce(model.options),
            )
        except NativeUnavailable as error:
            reason = str(error)
    if options.required:
        raise ValueError(f"--cpu-backend native cannot run this model: {reason}")
    if group.rank == 0:
        logger.warning("steps run through torch, several times slower: %s", reason)
    return None


def _all_reduce(options: LayerOptions) -> Callable[[torch.Tensor], None]:
    """Sums a buffer over the ranks, in place."""

    def reduce(values: torch.Tensor) -> None:
        total = options.group.all_reduce(values, fixed_order=options.batch_invariant)
        if total is not values:
            values.copy_(total)

    return reduce


def _model_tensors(model: DecoderModel) -> ModelTensors:
    first = _llama_layer(model.layers[0])
    return ModelTensors(
        num_heads=first.attention.num_heads,
        num_kv_heads=first.attention.num_kv_heads,
        head_dim=model.config.head_dim,
        eps=model.config.rms_norm_eps,
        scale=model.config.head_dim**-0.5,
        cos_sin=model.cos_sin,
        embedding=model.embed_tokens.weight,
        vocab_start=model.embed_tokens.start,
        lm_head=model.lm_head.source(model.embed_tokens).weight,
        final_norm=model.norm.weight,
        num_layers=len(model.layers),
        block_size=model.config.block_size,
        intermediate_size=_gated_mlp(first).size,
        layers=_layers(model),
    )


def _layers(model: DecoderModel) -> Iterator[LayerTensors]:
    """Drops each layer's weights once they are packed: no second copy of the model is in memory."""
    for layer in map(_llama_layer, model.layers):
        yield _layer_tensors(layer, model.options.group.rank)
        layer.attention.drop()
        _gated_mlp(layer).drop()


def _layer_tensors(layer: LlamaLayer, rank: int) -> LayerTensors:
    attention, mlp = layer.attention, _gated_mlp(layer)
    return LayerTensors(
        qkv=_linear_tensors(attention.qkv),
        output=_linear_tensors(attention.output, rank),
        gate_up=_linear_tensors(mlp.gate_up),
        down=_linear_tensors(mlp.down, rank),
        input_norm=layer.norms[0].weight,
        post_attention_norm=layer.norms[1].weight,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
    )


def _llama_layer(layer: DecoderLayer) -> LlamaLayer:
    assert isinstance(layer, LlamaLayer), "a family that runs natively has Llama's layers"
    return layer


def _gated_mlp(layer: LlamaLayer) -> GatedMLP:
    assert isinstance(layer.mlp, GatedMLP), "a family that runs natively is dense"
    return layer.mlp


def _linear_tensors(
    layer: ColumnParallelLinear | RowParallelLinear, rank: int = 0
) -> LinearTensors:
    """A product that the ranks' results are summed up of gets its bias on rank 0 only."""
    return LinearTensors(weight=layer.weight.dense(), bias=layer.bias if rank == 0 else None)
