"""Decoder steps on CPU in C++: a whole forward pass per call, compiled for this machine.

For a small model, dispatching a step's hundred torch operators takes longer than computing the
step, and torch has no attention that reads a paged KV cache in place. On CPU, one call therefore
computes all layers. The library is compiled once per machine (`build.py`) and loaded with ctypes.
Without a compiler, the engine falls back to torch, against which the library is tested.
"""

from kernels.native.build import NativeUnavailable, build_library
from kernels.native.decoder import (
    LayerTensors,
    ModelTensors,
    NativeDecoder,
    packed_bytes,
)
from kernels.native.drafts import DraftTables, NativeDrafter, NativeDrafts
from kernels.native.encoder import (
    EncoderLayerTensors,
    EncoderTensors,
    NativeEncoder,
    NormTensors,
)
from kernels.native.head import HeadTensors, NativeHead
from kernels.native.lora import LORA_TYPES, NativeLora, StepAdapters, TokenGroups
from kernels.native.packing import LinearTensors
from kernels.native.precision import bf16_speedup, has_bf16_products
from kernels.native.sampler import apply_bitmask_native, sample_native
from kernels.native.weight_cache import cached_memory
from kernels.native.weight_memory import WeightMemory

__all__ = [
    "LORA_TYPES",
    "DraftTables",
    "EncoderLayerTensors",
    "EncoderTensors",
    "HeadTensors",
    "LayerTensors",
    "LinearTensors",
    "ModelTensors",
    "NativeDecoder",
    "NativeDrafter",
    "NativeDrafts",
    "NativeEncoder",
    "NativeHead",
    "NativeLora",
    "NativeUnavailable",
    "NormTensors",
    "StepAdapters",
    "TokenGroups",
    "WeightMemory",
    "apply_bitmask_native",
    "bf16_speedup",
    "build_library",
    "cached_memory",
    "has_bf16_products",
    "packed_bytes",
    "sample_native",
]
