"""Functions and structs of the compiled library; the structs mirror src/decoder.h."""

from __future__ import annotations

import ctypes
from functools import cache

from kernels.native.build import NativeUnavailable, build_library

_I64, _F32, _PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

Reduce = ctypes.CFUNCTYPE(ctypes.c_int32, _PTR, _I64)
"""Callback that sums `count` values over ranks, in place: returns 0, or a nonzero number to abort
the step."""


class LinearWeight(ctypes.Structure):
    """A packed weight [n, k] and its bias."""

    _fields_ = (("packed", _PTR), ("bias", _PTR), ("n", _I64), ("k", _I64))


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


class SamplingColumns(ctypes.Structure):
    """Sampling parameters of all rows of the logits; None for a filter that no row uses."""

    _fields_ = (
        ("greedy_below", _F32),
        *((name, _PTR) for name in ("seeds", "positions", "temperature")),
        *((name, _PTR) for name in ("top_k", "top_p", "log_min_p")),
    )


class LoraStep(ctypes.Structure):
    """Adapters of a layer, and tensors of a step; mirrors src/lora.h."""

    _fields_ = (
        *((name, _PTR) for name in ("a", "b", "ranks", "parts")),
        *((name, _I64) for name in ("num_in", "num_out", "rank", "num_projections", "num_parts")),
        *((name, _PTR) for name in ("out", "x", "tokens", "groups")),
        *((name, _I64) for name in ("num_groups", "num_threads")),
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
