"""Handover of a loaded model to the compiled CPU library, if the library can run it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import kernels
from kernels.native import (
    HeadTensors,
    LayerTensors,
    LinearTensors,
    ModelTensors,
    NativeDecoder,
    NativeHead,
    NativeUnavailable,
    WeightMemory,
    build_library,
    cached_memory,
    packed_bytes,
)
from worker.memory import release_freed_memory
from worker.models.architectures.decoder import DecoderLayer, DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.architectures.mtp import MtpHead
from worker.models.config.checkpoint import block_hash_salt
from worker.models.layers.attention import GatedMLP
from worker.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker.models.layers.linear_method import LayerOptions
from worker.models.loading.native_encoder import pack_encoder

logger = logging.getLogger(__name__)


_PACKING_SOURCES = (
    Path(__file__).parent,
    *(Path(kernels.__path__[0]) / name for name in ("linear", "native")),
)
"""Folders with the code that packs weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeOptions:
    """Options of the compiled CPU library for a model."""

    page_size: int
    num_threads: int
    required: bool
    """Whether an unsupported model is an error; otherwise torch runs it."""
    weight_cache: bool = False
    """Whether packed weights are memory-mapped from a file in the cache folder."""


def weight_memory(
    model: DecoderModel, options: NativeOptions | None
) -> AbstractContextManager[WeightMemory]:
    """Memory for the packed weights of a model that is not loaded yet.

    With `weight_cache`, a file in the cache folder is mapped. If it exists, the memory is already
    filled and weights need not be read; otherwise, it is saved when the context ends. Private
    memory if the cache is disabled, or does not support the model.

    Args:
        model: the model; only shapes and types are used.
        options: options of the compiled library; None if torch runs the model.
    """
    # The file does not contain weights that torch uses, such as those of an MTP head.
    if model.mtp is not None:
        return nullcontext(WeightMemory())
    if options is None or not options.weight_cache or _problem(model, options):
        return nullcontext(WeightMemory())
    group = model.options.group
    content = (
        f"{block_hash_salt(model.config.folder)} rank {group.rank} of {group.world_size} "
        f"{model.options.dtype} {'fp8 ' * model.options.quantizes_fp8}{_packing_digest()}"
    )
    return cached_memory(content, packed_bytes(_model_tensors(model), options.page_size))


def pack_weights(
    model: DecoderModel, options: NativeOptions | None, memory: WeightMemory | None = None
) -> None:
    """Packs the weights of a loaded model.

    Args:
        model: a model whose weights are loaded, or in `memory`.
        options: options of the compiled library, which receives the weights if it supports the
            model; None if torch runs the model.
        memory: memory for the library's packed weights; None for private memory.

    Raises:
        ValueError: the library is required but cannot run the model.
    """
    if options is not None and model.config.is_bidirectional:
        pack_encoder(model, num_threads=options.num_threads, required=options.required)
    elif options is not None:
        model.native = build_native(model, options, memory or WeightMemory())
    if model.native is not None and model.mtp is not None:
        _pack_head(model.native, model.mtp, model.options.group.world_size)
    model.process_after_loading()


def build_native(
    model: DecoderModel, options: NativeOptions, memory: WeightMemory
) -> NativeDecoder | None:
    """The model for the compiled library; None if it is unsupported, in which case the reason is
    logged.

    Raises:
        ValueError: the library is required but cannot run the model.
    """
    group = model.options.group
    problem = _problem(model, options)
    if not problem:
        return NativeDecoder(
            _model_tensors(model, memory),
            page_size=options.page_size,
            num_threads=options.num_threads,
            memory=memory,
            all_reduce=None if group.world_size == 1 else _all_reduce(model.options),
        )
    if options.required:
        raise ValueError(
            f"--cpu-backend native cannot run this model ({problem}): use --cpu-backend auto"
        )
    if group.rank == 0:
        logger.warning("falling back to torch on CPU, which is several times slower: %s", problem)
    return None


def _problem(model: DecoderModel, options: NativeOptions) -> str:
    """Reason why the library does not support a model; empty if it does support it."""
    if any(model.windows):
        return (
            f"sliding windows of {max(model.windows)} tokens are not supported; set "
            f"--max-model-len {min(filter(None, model.windows))} to serve without them"
        )
    if not vars(type(model)).get("runs_natively", False):
        return f"{type(model).__name__} is not supported"
    try:
        build_library()
    except NativeUnavailable as error:
        return str(error)
    return _model_tensors(model).unsupported(options.page_size) or ""


@cache
def _packing_digest() -> str:
    """Digest of the code that packs weights, so that files written by other versions are
    ignored."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in _PACKING_SOURCES:
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _all_reduce(options: LayerOptions) -> Callable[[torch.Tensor], None]:
    """A function that sums a buffer over the ranks, in place."""

    def reduce(values: torch.Tensor) -> None:
        total = options.group.all_reduce(values, fixed_order=options.batch_invariant)
        if total is not values:
            values.copy_(total)

    return reduce


def _model_tensors(model: DecoderModel, memory: WeightMemory | None = None) -> ModelTensors:
    """The model's tensors for the library. With `memory`, packing them also drops the layers'
    weights; with None, they only have shapes and types."""
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
        layers=_layers(model, memory),
    )


def _layers(model: DecoderModel, memory: WeightMemory | None) -> Iterator[LayerTensors]:
    """Yields each layer's tensors, and drops the layer's weights after the library has packed them,
    so that the model is never in memory twice."""
    is_loaded = memory is not None and not memory.is_filled
    for layer in map(_llama_layer, model.layers):
        yield _layer_tensors(layer, model.options.group.rank, is_loaded)
        if memory is not None:
            layer.attention.drop()
            _gated_mlp(layer).drop()
            release_freed_memory()


def _layer_tensors(layer: LlamaLayer, rank: int, is_loaded: bool) -> LayerTensors:
    attention, mlp = layer.attention, _gated_mlp(layer)

    def tensors(linear: ColumnParallelLinear | RowParallelLinear, has_bias: bool) -> LinearTensors:
        weight = linear.weight.dense() if is_loaded else linear.shape_of_weight()
        return LinearTensors(
            weight=weight,
            bias=linear.bias if has_bias else None,
            lora=None if linear.lora is None else linear.lora.weights.native,
        )

    return LayerTensors(
        qkv=tensors(attention.qkv, True),
        # Outputs of row-parallel layers are summed over ranks, so only rank 0 adds the bias.
        output=tensors(attention.output, rank == 0),
        gate_up=tensors(mlp.gate_up, True),
        down=tensors(mlp.down, rank == 0),
        input_norm=layer.norms[0].weight,
        post_attention_norm=layer.norms[1].weight,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
    )


def _pack_head(decoder: NativeDecoder, head: MtpHead, world_size: int) -> None:
    """Packs the MTP head of a natively run model for the library and drops its weights. Does
    nothing, so that torch runs the head, if there are several ranks or heads, or if
    `recycles_normed` is false."""
    if world_size > 1 or head.further or not head.mtp.recycles_normed:
        return
    layer = _llama_layer(head.layer)
    tensors = HeadTensors(
        layer=_layer_tensors(layer, 0, True),
        embedding_norm=head.embedding_norm.weight,
        hidden_norm=head.hidden_norm.weight,
        projection=head.projection.weight.dense(),
        final_norm=head.final_norm.weight,
        hidden_first=head.mtp.hidden_first,
        zeroes_first=head.mtp.zeroes_first,
    )
    head.native = NativeHead(decoder, tensors)
    layer.attention.drop()
    _gated_mlp(layer).drop()
    head.projection.drop()


def _llama_layer(layer: DecoderLayer) -> LlamaLayer:
    assert isinstance(layer, LlamaLayer), "a family that runs natively has Llama's layers"
    return layer


def _gated_mlp(layer: LlamaLayer) -> GatedMLP:
    assert isinstance(layer.mlp, GatedMLP), "a family that runs natively is dense"
    return layer.mlp
