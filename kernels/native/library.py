"""Functions and structs of the compiled library; the structs mirror src/decoder.h."""

from __future__ import annotations

import ctypes
from functools import cache

from kernels.native.build import NativeUnavailable, build_library

_I64, _F32, _PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

Reduce = ctypes.CFUNCTYPE(ctypes.c_int32, _PTR, _I64)
"""Callback that sums `count` values over ranks, in place: returns 0, or a nonzero number to abort
the step."""


class LoraTensors(ctypes.Structure):
    """Adapters of a linear layer; mirrors `LoraWeights` of src/lora.h."""

    _fields_ = (
        *((name, _PTR) for name in ("a", "b", "ranks", "parts")),
        *((name, _I64) for name in ("num_in", "num_out", "rank", "num_projections", "num_parts")),
    )


class LoraTokens(ctypes.Structure):
    """Tokens of a step that have an adapter; mirrors src/lora.h."""

    _fields_ = (("tokens", _PTR), ("groups", _PTR), ("num_groups", _I64))


class LoraStep(ctypes.Structure):
    """A call for a single layer; mirrors src/lora.h."""

    _fields_ = (
        ("weights", ctypes.POINTER(LoraTensors)),
        ("tokens", LoraTokens),
        *(("out", _PTR), ("x", _PTR), ("num_threads", _I64)),
    )


class LinearWeight(ctypes.Structure):
    """A packed weight [n, k], its bias, and its adapters."""

    _fields_ = (
        *(("packed", _PTR), ("bias", _PTR), ("n", _I64), ("k", _I64)),
        ("lora", ctypes.POINTER(LoraTensors)),
    )


class LayerWeights(ctypes.Structure):
    """Weights and caches of one decoder layer."""

    _fields_ = (
        *((name, LinearWeight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _PTR) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm")),
        *((name, _PTR) for name in ("k_cache", "v_cache")),
    )


class ModelWeights(ctypes.Structure):
    """Weights and sizes of a model on one rank."""

    _fields_ = (
        ("is_bf16", _I64),
        *((name, _I64) for name in ("hidden_size", "intermediate_size", "num_heads")),
        *((name, _I64) for name in ("num_kv_heads", "head_dim", "rotated_dim")),
        *((name, _I64) for name in ("page_size", "block_size", "num_layers")),
        *((name, _I64) for name in ("vocab_start", "vocab_end")),
        ("eps", _F32),
        ("scale", _F32),
        *((name, _PTR) for name in ("cos_sin", "embedding", "final_norm")),
        ("lm_head", LinearWeight),
        ("layers", ctypes.POINTER(LayerWeights)),
        ("reduce", Reduce),
    )


class StepRows(ctypes.Structure):
    """Rows of one step, and the tables that the step reads."""

    _fields_ = (
        ("num_rows", _I64),
        ("rows", _PTR),
        ("token_pool", _PTR),
        ("token_stride", _I64),
        ("page_table", _PTR),
        ("page_stride", _I64),
        ("logits_indices", _PTR),
        ("num_logits", _I64),
        ("inputs", _PTR),
        ("adapters", LoraTokens),
        ("logits_adapters", LoraTokens),
    )


class HeadWeights(ctypes.Structure):
    """Weights of a head for multi-token prediction, except those of its layer; mirrors
    src/head.h."""

    _fields_ = (
        *((name, _PTR) for name in ("embedding_norm", "hidden_norm")),
        ("projection", LinearWeight),
        *((name, _I64) for name in ("hidden_first", "zeroes_first")),
        ("outputs", _PTR),
    )


class NormWeight(ctypes.Structure):
    """Weight and bias of a LayerNorm; mirrors src/encoder.h."""

    _fields_ = (("weight", _PTR), ("bias", _PTR))


class EncoderLayer(ctypes.Structure):
    """Weights of one encoder layer; mirrors src/encoder.h."""

    _fields_ = (
        *((name, LinearWeight) for name in ("qkv", "output", "up", "down")),
        *((name, NormWeight) for name in ("after_attention", "after_mlp")),
    )


class EncoderWeights(ctypes.Structure):
    """Weights and sizes of an encoder; mirrors src/encoder.h."""

    _fields_ = (
        *((name, _I64) for name in ("is_bf16", "hidden_size", "intermediate_size", "num_heads")),
        *((name, _I64) for name in ("head_dim", "num_layers")),
        *((name, _F32) for name in ("eps", "scale")),
        *((name, _PTR) for name in ("words", "positions", "types")),
        ("first_position", _I64),
        ("norm", NormWeight),
        ("layers", ctypes.POINTER(EncoderLayer)),
    )


class EncoderStep(ctypes.Structure):
    """Texts of one step; mirrors src/encoder.h."""

    _fields_ = (
        *(("num_texts", _I64), ("rows", _PTR), ("token_pool", _PTR), ("token_stride", _I64)),
        *(("types", _PTR), ("logits_indices", _PTR), ("num_logits", _I64)),
    )


class SamplingColumns(ctypes.Structure):
    """Sampling parameters of all rows of the logits; None for a filter that no row uses."""

    _fields_ = (
        ("greedy_below", _F32),
        *((name, _PTR) for name in ("seeds", "positions", "temperature")),
        *((name, _PTR) for name in ("top_k", "top_p", "log_min_p")),
    )


class Drafting(ctypes.Structure):
    """Parameters and outputs of drafting; mirrors src/draft.h."""

    _fields_ = (
        *((name, _PTR) for name in ("temperature", "top_p", "log_min_p", "top_k", "seeds")),
        ("end_tokens", _PTR),
        ("num_ends", _I64),
        *((name, _PTR) for name in ("shares", "bounds")),
        ("num_levels", _I64),
        ("greedy_below", _F32),
        ("threshold", _F32),
        ("token_pool", _PTR),
        ("most", _I64),
        *((name, _PTR) for name in ("tokens", "levels", "guessed", "drafted")),
    )


@cache
def library() -> ctypes.CDLL:
    """The library, compiled if necessary and loaded once per process.

    Raises:
        NativeUnavailable: the library cannot be compiled or loaded on this machine.
    """
    try:
        loaded = ctypes.CDLL(str(build_library()))
    except OSError as error:
        raise NativeUnavailable(f"failed to load the compiled library: {error}") from error
    signatures = {
        "has_tiles": (ctypes.c_int32, []),
        "packed_elements": (_I64, [_I64, _I64, _I64]),
        "pack": (None, [_I64, _PTR, _I64, _I64, _PTR]),
        "linear": (None, [_I64, _PTR, _I64, ctypes.POINTER(LinearWeight), _PTR]),
        "add_lora": (None, [_I64, ctypes.POINTER(LoraStep)]),
        "apply_bitmask": (None, [_PTR, _I64, _PTR, _I64, ctypes.c_char_p]),
        "sample": (None, [_PTR, _I64, _I64, ctypes.POINTER(SamplingColumns), _PTR]),
        "create": (_PTR, [ctypes.POINTER(ModelWeights), _I64, ctypes.c_double]),
        "destroy": (None, [_PTR]),
        "forward": (ctypes.c_int32, [_PTR, ctypes.POINTER(StepRows), _PTR]),
        "logits": (None, [_PTR, _PTR, _I64, _PTR]),
        "create_encoder": (_PTR, [ctypes.POINTER(EncoderWeights), _I64, ctypes.c_double]),
        "destroy_encoder": (None, [_PTR]),
        "encode": (None, [_PTR, ctypes.POINTER(EncoderStep), _PTR]),
        "draft": (None, [_PTR, ctypes.POINTER(StepRows), ctypes.POINTER(Drafting)]),
        "create_head": (
            _PTR,
            [_PTR, ctypes.POINTER(ModelWeights), ctypes.POINTER(HeadWeights), ctypes.c_double],
        ),
        "destroy_head": (None, [_PTR]),
        "head_forward": (None, [_PTR, ctypes.POINTER(StepRows), _PTR, _PTR]),
        "head_draft": (None, [_PTR, ctypes.POINTER(StepRows), ctypes.POINTER(Drafting)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, f"rayfleet_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded
