"""Native encoder: a post-norm encoder whose forward pass is one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.library import EncoderLayer, EncoderStep, EncoderWeights, NormWeight, library
from kernels.native.packing import LinearTensors, PackedTensors

_VECTOR = 16
"""Number of floats per vector; sizes must be multiples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormTensors:
    """Weight and bias of a LayerNorm, [hidden] each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderLayerTensors:
    """Weights of one layer. `qkv` has rows of q, then k, then v."""

    qkv: LinearTensors
    output: LinearTensors
    up: LinearTensors
    down: LinearTensors
    after_attention: NormTensors
    after_mlp: NormTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderTensors:
    """Loaded weights of an encoder on a single rank. All have one data type, fp32 or bf16."""

    num_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    words: torch.Tensor
    """[vocabulary, hidden]: token embeddings."""
    positions: torch.Tensor
    """[positions, hidden]: position embeddings."""
    first_position: int
    """Row of the position embeddings that belongs to a text's first token."""
    types: torch.Tensor
    """[types, hidden]: embeddings of token types."""
    norm: NormTensors
    """The norm after the embeddings."""
    num_layers: int
    layers: Iterable[EncoderLayerTensors]
    """Layers in order; each is packed before the next one is requested, so that the iterator may
    drop its weights in between."""

    def unsupported(self) -> str | None:
        """Reason why the library cannot run this encoder; None if it can."""
        if self.words.dtype not in (torch.float32, torch.bfloat16):
            return f"{self.words.dtype} is not supported: only fp32 and bf16 are"
        sizes = {
            "hidden size": self.words.shape[1],
            "intermediate size": self.intermediate_size,
            "head size": self.head_dim,
        }
        for name, size in sizes.items():
            if size % _VECTOR:
                return f"its {name} ({size}) is not a multiple of {_VECTOR}"
        if self.num_heads * self.head_dim != self.words.shape[1]:
            return f"its {self.num_heads} heads of size {self.head_dim} are not its hidden size"
        return None


class NativeEncoder:
    """Forward passes of an encoder; activations are fp32 for all types of weights.

    A token's result depends, bitwise, only on its own text: not on other texts or on the number of
    threads.

    Args:
        model: weights, all of which are copied or packed, so they may be dropped afterwards.
        num_threads: maximum number of threads of a forward pass, including the caller's.
        ms_per_thread: milliseconds of estimated work per thread; short passes use fewer threads.

    Raises:
        NativeUnavailable: the library cannot be compiled or loaded on this machine.
    """

    def __init__(
        self, model: EncoderTensors, *, num_threads: int, ms_per_thread: float = 1.0
    ) -> None:
        self._handle: int | None = None
        assert model.unsupported() is None, "unsupported models are rejected earlier"
        self._library = library()
        self._packed = PackedTensors()
        self._hidden_size = model.words.shape[1]
        layers = (EncoderLayer * model.num_layers)(*map(self._layer, model.layers))
        weights = EncoderWeights(
            is_bf16=model.words.dtype == torch.bfloat16,
            hidden_size=self._hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            num_layers=model.num_layers,
            eps=model.eps,
            scale=model.head_dim**-0.5,
            words=self._packed.copy(model.words),
            positions=self._packed.copy(model.positions),
            types=self._packed.copy(model.types),
            first_position=model.first_position,
            norm=self._norm(model.norm),
            layers=layers,
        )
        self._handle = self._library.rayfleet_create_encoder(
            ctypes.byref(weights), num_threads, ms_per_thread
        )

    def forward(
        self,
        rows: npt.NDArray[np.int64],
        token_pool: torch.Tensor,
        types: torch.Tensor | None = None,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states, fp32 [T, hidden] of all tokens, or [S, hidden] of `logits_indices`.

        Args:
            rows: [R, 4], contiguous: slot, 0, number of tokens, and an unused number, of each text.
            token_pool: int32 [slots, positions]: tokens of each text.
            types: int64 [T], contiguous: token types; None if all are 0.
            logits_indices: int64 [S], contiguous, ascending: tokens whose hidden states are needed;
                None for all.
        """
        num_tokens = int(rows[:, 2].sum()) if logits_indices is None else len(logits_indices)
        hidden = torch.empty(num_tokens, self._hidden_size)
        step = EncoderStep(
            num_texts=len(rows),
            rows=rows.ctypes.data,
            token_pool=token_pool.data_ptr(),
            token_stride=token_pool.stride(0),
            types=None if types is None else types.data_ptr(),
            logits_indices=None if logits_indices is None else logits_indices.data_ptr(),
            num_logits=-1 if logits_indices is None else num_tokens,
        )
        self._library.rayfleet_encode(self._handle, ctypes.byref(step), hidden.data_ptr())
        return hidden

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.rayfleet_destroy_encoder(self._handle)

    def _layer(self, layer: EncoderLayerTensors) -> EncoderLayer:
        return EncoderLayer(
            qkv=self._packed.linear(layer.qkv),
            output=self._packed.linear(layer.output),
            up=self._packed.linear(layer.up),
            down=self._packed.linear(layer.down),
            after_attention=self._norm(layer.after_attention),
            after_mlp=self._norm(layer.after_mlp),
        )

    def _norm(self, norm: NormTensors) -> NormWeight:
        return NormWeight(self._packed.floats(norm.weight), self._packed.floats(norm.bias))
