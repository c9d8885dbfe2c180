"""GPU and CPU math: one op per folder, a Triton kernel beside its torch reference."""

from kernels.attention import (
    DecodeMetadata,
    ExtendMetadata,
    decode_attention,
    extend_attention,
    prepare_decode,
    prepare_extend,
)
from kernels.gumbel_noise import gumbel_noise
from kernels.linear import PackedLinear, linear, pack_linear_weight
from kernels.registry import Backend, Op, OpRegistry, registry
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rotary_embedding import rotary_embedding
from kernels.silu_and_mul import silu_and_mul
from kernels.store_kv_cache import store_kv_cache

__all__ = [
    "Backend",
    "DecodeMetadata",
    "ExtendMetadata",
    "Op",
    "OpRegistry",
    "PackedLinear",
    "decode_attention",
    "extend_attention",
    "fused_add_rms_norm",
    "gumbel_noise",
    "linear",
    "pack_linear_weight",
    "prepare_decode",
    "prepare_extend",
    "registry",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv_cache",
]
