"""Native decoder: a dense model whose forward pass is one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.library import (
    Drafting,
    HeadWeights,
    LayerWeights,
    ModelWeights,
    Reduce,
    StepRows,
    library,
)
from kernels.native.lora import StepAdapters
from kernels.native.packing import LinearTensors, PackedTensors
from kernels.native.weight_memory import CountedMemory, WeightMemory

_VECTOR = 16
"""Number of floats per vector; sizes must be multiples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """Weights of one layer. `qkv` has rows of q, then k, then v; `gate_up` has rows of the gate
    first."""

    qkv: LinearTensors
    output: LinearTensors
    gate_up: LinearTensors
    down: LinearTensors
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensors:
    """Loaded weights of a model on one rank. All have one data type, fp32 or bf16."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    cos_sin: torch.Tensor
    """fp32 [positions, rotary dimensions]: cosines, then sines."""
    embedding: torch.Tensor
    """[local vocabulary, hidden]: token embeddings."""
    vocab_start: int
    """First token of the local vocabulary."""
    lm_head: torch.Tensor
    """[local vocabulary, hidden]: weight of the LM head; may be the embedding."""
    final_norm: torch.Tensor
    num_layers: int
    intermediate_size: int
    """Intermediate size on this rank."""
    block_size: int = 1
    """Number of consecutive positions that attend to each other, in blocks counted from position 0;
    1 for causal attention. Rows of a step must end with whole blocks."""
    layers: Iterable[LayerTensors]
    """Layers in order; each is packed before the next one is requested, so that the iterator may
    drop its weights in between."""

    def unsupported(self, page_size: int) -> str | None:
        """Reason why the library cannot run this model; None if it can."""
        if self.embedding.dtype not in (torch.float32, torch.bfloat16):
            return f"{self.embedding.dtype} is not supported: only fp32 and bf16 are"
        sizes = {
            "hidden size": self.embedding.shape[1],
            "head size": self.head_dim,
            "page size": page_size,
        }
        for name, size in sizes.items():
            if size % _VECTOR:
                return f"its {name} ({size}) is not a multiple of {_VECTOR}"
        if page_size % self.block_size:
            return f"its page size ({page_size}) is not a multiple of its block size"
        return None


class NativeDecoder:
    """Computes forward passes and logits; activations are fp32 for all types of weights.

    A token's result depends, bitwise, only on its own request: not on other rows, on the chunks of
    its prompt, on its pages, or on the number of threads.

    Args:
        model: weights, all of which are copied or packed, so they may be dropped afterwards. If
            `memory` is filled, only their shapes and types are used.
        page_size: tokens per page.
        num_threads: maximum number of threads of a forward pass, including the caller's.
        ms_per_thread: milliseconds of estimated work per thread; short passes use fewer threads.
        memory: memory for the copies, which may be filled with them already; None for memory of
            this process.
        all_reduce: sums an fp32 tensor over the ranks, in place; None for a single rank.

    Raises:
        NativeUnavailable: the library cannot be compiled or loaded on this machine.
    """

    def __init__(
        self,
        model: ModelTensors,
        *,
        page_size: int,
        num_threads: int,
        ms_per_thread: float = 1.0,
        memory: WeightMemory | None = None,
        all_reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        assert model.unsupported(page_size) is None, "unsupported models are rejected earlier"
        self.library = library()
        """The compiled library."""
        self.packed = PackedTensors(memory)
        """Packed weights, which are kept alive as long as the decoder."""
        self._threads = (num_threads, ms_per_thread)
        self._all_reduce = all_reduce
        self._error: BaseException | None = None
        self._hidden_size = model.embedding.shape[1]
        self._vocab_size = model.lm_head.shape[0]
        self._inner_size = -(-model.intermediate_size // _VECTOR) * _VECTOR
        self._is_bf16 = model.embedding.dtype == torch.bfloat16
        self._reduce = Reduce(self._sum_over_ranks) if all_reduce else Reduce()
        self._layers = (LayerWeights * model.num_layers)(*map(self.pack_layer, model.layers))
        self.weights = self._describe(model, page_size)
        """Weights and sizes in the form that the library reads."""
        self._handle: int | None = None

    def bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Sets the KV caches (keys, values) of all layers, for num_pages * page_size tokens each.

        Their layout within a page is specific to the library.
        """
        self.close()
        for layer, (keys, values) in zip(self._layers, caches, strict=True):
            layer.k_cache, layer.v_cache = keys.data_ptr(), values.data_ptr()
        self._handle = self.library.rayfleet_create(ctypes.byref(self.weights), *self._threads)

    def forward(
        self,
        rows: npt.NDArray[np.int64],
        token_pool: torch.Tensor,
        page_table: torch.Tensor,
        logits_indices: torch.Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, fp32 [T, hidden] of a step's tokens, or [S, hidden]
        of `logits_indices`.

        Args:
            rows: [R, 4], contiguous: slot, first position, number of tokens, and an unused number.
            token_pool: int32 [slots, positions]: tokens of each request.
            page_table: int32 [slots, pages]: page ids of each request.
            logits_indices: int64 [S], contiguous, ascending: tokens whose hidden states are needed;
                None for all. For other tokens, the last layer only computes keys and values.
            adapters: tokens that have a LoRA adapter; None if no token has one.

        Raises:
            Exception: the exception that `all_reduce` raised.
        """
        assert self._handle is not None, "bind must be called first"
        num_tokens = int(rows[:, 2].sum()) if logits_indices is None else len(logits_indices)
        hidden = torch.empty(num_tokens, self._hidden_size)
        step = StepRows(
            len(rows), rows.ctypes.data,
            token_pool.data_ptr(), token_pool.stride(0),
            page_table.data_ptr(), page_table.stride(0),
            *((None, -1) if logits_indices is None else (logits_indices.data_ptr(), num_tokens)),
            None,
        )  # fmt: skip
        if adapters is not None:
            step.adapters = adapters.all.described()
            step.logits_adapters = adapters.selected.described()
        done = self.library.rayfleet_forward(self._handle, ctypes.byref(step), hidden.data_ptr())
        if not done:
            assert self._error is not None
            raise self._error
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states, fp32 [R, hidden], to logits, fp32 [R, local vocabulary]."""
        assert self._handle is not None, "bind must be called first"
        hidden = hidden.contiguous()
        scores = torch.empty(hidden.shape[0], self._vocab_size)
        self.library.rayfleet_logits(
            self._handle, hidden.data_ptr(), hidden.shape[0], scores.data_ptr()
        )
        return scores

    def draft(self, step: StepRows, drafting: Drafting) -> None:
        """Drafts tokens after each row, and writes them to the arrays of NativeDrafter."""
        assert self._handle is not None, "bind must be called first"
        assert self._all_reduce is None, "a draft model is replicated on every rank"
        self.library.rayfleet_draft(self._handle, ctypes.byref(step), ctypes.byref(drafting))

    def create_head(self, weights: ModelWeights, head: HeadWeights) -> int:
        """Handle of a head that computes with this decoder's threads.

        Args:
            weights: `weights` with the head's layer and final norm.
            head: the head's other weights.
        """
        assert self._handle is not None, "bind must be called first"
        assert self._all_reduce is None, "a head runs natively on a single rank"
        handle: int = self.library.rayfleet_create_head(
            self._handle, ctypes.byref(weights), ctypes.byref(head), self._threads[1]
        )
        return handle

    def close(self) -> None:
        """Stops the library's threads. Safe to call twice."""
        if self._handle is not None:
            self.library.rayfleet_destroy(self._handle)
            self._handle = None

    def _sum_over_ranks(self, address: int, count: int) -> int:
        assert self._all_reduce is not None
        values = (ctypes.c_float * count).from_address(address)
        try:
            self._all_reduce(torch.frombuffer(values, dtype=torch.float32))
        except BaseException as error:  # exceptions cannot cross C++
            self._error = error
            return 1
        return 0

    def _describe(self, model: ModelTensors, page_size: int) -> ModelWeights:
        return ModelWeights(
            is_bf16=self._is_bf16,
            hidden_size=self._hidden_size,
            intermediate_size=self._inner_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rotated_dim=model.cos_sin.shape[1],
            page_size=page_size,
            block_size=model.block_size,
            num_layers=model.num_layers,
            vocab_start=model.vocab_start,
            vocab_end=model.vocab_start + model.embedding.shape[0],
            eps=model.eps,
            scale=model.scale,
            cos_sin=self.packed.keep(model.cos_sin.float().contiguous()),
            embedding=self.packed.copy(model.embedding),
            final_norm=self.packed.floats(model.final_norm),
            lm_head=self.packed.linear(LinearTensors(weight=model.lm_head, bias=None)),
            layers=self._layers,
            reduce=self._reduce,
        )

    def pack_layer(self, layer: LayerTensors) -> LayerWeights:
        """A layer with packed weights, which are kept alive as long as the decoder."""
        return LayerWeights(
            qkv=self.packed.linear(layer.qkv),
            output=self.packed.linear(layer.output),
            gate_up=self.packed.linear(self._paired_gate_up(layer.gate_up)),
            down=self.packed.linear(self._padded_down(layer.down)),
            input_norm=self.packed.floats(layer.input_norm),
            post_attention_norm=self.packed.floats(layer.post_attention_norm),
            q_norm=self.packed.floats(layer.q_norm),
            k_norm=self.packed.floats(layer.k_norm),
        )

    def _paired_gate_up(self, gate_up: LinearTensors) -> LinearTensors:
        """Interleaves rows of gate and up projection, alternating one vector of each, padded with
        zeros."""
        missing = self._inner_size - gate_up.weight.shape[0] // 2

        def pair(values: torch.Tensor) -> torch.Tensor:
            zeros = values.new_zeros(missing, *values.shape[1:])
            halves = (torch.cat((half, zeros)) for half in values.chunk(2))
            vectors = [half.view(-1, _VECTOR, *values.shape[1:]) for half in halves]
            return torch.stack(vectors, dim=1).flatten(0, 2)

        bias = gate_up.bias
        return replace(
            gate_up, weight=pair(gate_up.weight), bias=None if bias is None else pair(bias)
        )

    def _padded_down(self, down: LinearTensors) -> LinearTensors:
        """Pads the columns of the down projection with zeros, as gate and up projections are
        padded.
        """
        missing = self._inner_size - down.weight.shape[1]
        if not missing:
            return down
        return replace(down, weight=torch.nn.functional.pad(down.weight, (0, missing)))


def packed_bytes(model: ModelTensors, page_size: int) -> int:
    """Size of a decoder's packed weights in bytes, from shapes and types.

    Raises:
        NativeUnavailable: the library cannot be compiled or loaded on this machine.
    """
    memory = CountedMemory()
    NativeDecoder(model, page_size=page_size, num_threads=1, memory=memory)
    return memory.num_bytes
