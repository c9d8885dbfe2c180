"""Handover of a loaded encoder to the compiled CPU library, if the library can run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernels.native import (
    EncoderLayerTensors,
    EncoderTensors,
    LinearTensors,
    NativeEncoder,
    NativeUnavailable,
    NormTensors,
    build_library,
)
from worker.memory import release_freed_memory
from worker.models.architectures.bert import BertLayer, BertModel
from worker.models.architectures.decoder import DecoderModel
from worker.models.layers.linear import Linear
from worker.models.layers.norms import HiddenNorm, LayerNorm


def pack_encoder(model: DecoderModel, *, num_threads: int, required: bool) -> None:
    """Packs the weights of a loaded encoder for the library if it supports the encoder.

    Args:
        model: an encoder whose weights are loaded.
        num_threads: maximum number of threads of a forward pass.
        required: whether an unsupported encoder is an error instead of being run by torch.

    Raises:
        ValueError: the library is required but cannot run the encoder.
    """
    problem = _problem(model)
    if problem and required:
        raise ValueError(
            f"--cpu-backend native cannot run this model ({problem}): use --cpu-backend auto"
        )
    if not problem:
        assert isinstance(model, BertModel), "others are not supported"
        model.encoder = NativeEncoder(_tensors(model), num_threads=num_threads)
        model.embed_tokens.drop()
        model.tables.clear()


def _problem(model: DecoderModel) -> str:
    """Reason why the library does not support an encoder; empty if it does."""
    if not isinstance(model, BertModel):
        return f"{type(model).__name__} is not supported"
    if model.options.group.world_size > 1:
        return "encoders on several ranks are not supported"
    if _bert_layers(model)[0].attention.qkv.lora is not None:
        return "LoRA adapters of encoders are not supported"
    try:
        build_library()
    except NativeUnavailable as error:
        return str(error)
    return _tensors(model).unsupported() or ""


def _bert_layers(model: BertModel) -> list[BertLayer]:
    layers = [layer for layer in model.layers if isinstance(layer, BertLayer)]
    assert len(layers) == len(model.layers), "BERT has layers of one kind"
    return layers


def _tensors(model: BertModel) -> EncoderTensors:
    layers = _bert_layers(model)
    return EncoderTensors(
        num_heads=layers[0].attention.num_heads,
        head_dim=model.config.head_dim,
        intermediate_size=layers[0].mlp.up.shape[0],
        eps=model.config.rms_norm_eps,
        words=model.embed_tokens.weight,
        positions=model.tables["position_embeddings"],
        first_position=model.first_position,
        types=model.tables["token_type_embeddings"],
        norm=_norm(model.norm),
        num_layers=len(layers),
        layers=_layer_tensors(layers),
    )


def _layer_tensors(layers: Sequence[BertLayer]) -> Iterator[EncoderLayerTensors]:
    """Yields each layer's tensors, and drops the layer's weights after the library has packed them,
    so that the model is never in memory twice."""
    for layer in layers:
        yield _layer(layer)
        layer.attention.drop()
        layer.mlp.up.drop()
        layer.mlp.down.drop()
        release_freed_memory()


def _layer(layer: BertLayer) -> EncoderLayerTensors:
    after_attention, after_mlp = layer.norms.values()
    return EncoderLayerTensors(
        qkv=_linear(layer.attention.qkv),
        output=_linear(layer.attention.output),
        up=_linear(layer.mlp.up),
        down=_linear(layer.mlp.down),
        after_attention=_norm(after_attention),
        after_mlp=_norm(after_mlp),
    )


def _linear(linear: Linear) -> LinearTensors:
    return LinearTensors(weight=linear.weight.dense(), bias=linear.bias)


def _norm(norm: HiddenNorm) -> NormTensors:
    assert isinstance(norm, LayerNorm), "BERT has layer norms"
    assert norm.bias is not None, "the norms of BERT have biases"
    return NormTensors(weight=norm.weight, bias=norm.bias)
