"""Native head for multi-token prediction: one layer of a model in the compiled library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.decoder import LayerTensors, NativeDecoder
from kernels.native.library import Drafting, HeadWeights, LayerWeights, ModelWeights, StepRows
from kernels.native.packing import LinearTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTensors:
    """Loaded weights of a head. All have the data type of its model."""

    layer: LayerTensors
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: torch.Tensor
    """[hidden, 2 * hidden]: weight that combines the embedding and the hidden state."""
    final_norm: torch.Tensor
    hidden_first: bool
    """Whether the projection's input begins with the hidden state instead of the embedding."""
    zeroes_first: bool
    """Whether the embedding is replaced by zeros at position 0."""


class NativeHead:
    """Computes forward passes of a head, and drafts, with the embedding, the LM head and the
    threads of its model.

    Args:
        model: the model's decoder, on a single rank, which must outlive the head.
        head: weights, all of which are copied or packed.
    """

    def __init__(self, model: NativeDecoder, head: HeadTensors) -> None:
        self._model = model
        self._layers = (LayerWeights * 1)(model.pack_layer(head.layer))
        self._weights = HeadWeights(
            embedding_norm=model.packed.floats(head.embedding_norm),
            hidden_norm=model.packed.floats(head.hidden_norm),
            projection=model.packed.linear(LinearTensors(weight=head.projection, bias=None)),
            hidden_first=head.hidden_first,
            zeroes_first=head.zeroes_first,
        )
        self._final_norm = model.packed.floats(head.final_norm)
        self.hidden_size = len(head.final_norm)
        self._handle: int | None = None
        self._outputs = torch.empty(0)

    def bind(self, cache: tuple[torch.Tensor, torch.Tensor], outputs: torch.Tensor) -> None:
        """Sets the KV cache (keys, values) of the layer, and the outputs from which drafts start.
        The model's caches must be bound first.

        Args:
            cache: keys and values for num_pages * page_size tokens, in a layout that is specific to
                the library.
            outputs: fp32 [slots, hidden]: outputs at the position before the newest token.
        """
        self.close()
        layer = self._layers[0]
        layer.k_cache, layer.v_cache = (plane.data_ptr() for plane in cache)
        self._outputs = outputs
        self._weights.outputs = outputs.data_ptr()
        weights = ModelWeights.from_buffer_copy(self._model.weights)
        weights.num_layers, weights.layers = 1, self._layers
        weights.final_norm = self._final_norm
        self._handle = self._model.create_head(weights, self._weights)

    def forward(
        self,
        rows: npt.NDArray[np.int64],
        token_pool: torch.Tensor,
        page_table: torch.Tensor,
        hidden: torch.Tensor,
        logits_indices: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Outputs after the final norm, fp32 [S, hidden], of the tokens `logits_indices`.

        Args:
            rows: as in NativeDecoder. The token after each position must be in the pool.
            token_pool: int32 [slots, positions]: tokens of each request.
            page_table: int32 [slots, pages]: page ids of each request.
            hidden: fp32 [T, hidden], contiguous: the model's hidden states of the step's tokens.
            logits_indices: int64 [S], contiguous, ascending.
        """
        assert self._handle is not None, "bind must be called first"
        outputs = torch.empty(len(logits_indices), self.hidden_size)
        step = StepRows(
            len(rows), rows.ctypes.data,
            token_pool.data_ptr(), token_pool.stride(0),
            page_table.data_ptr(), page_table.stride(0),
            logits_indices.ctypes.data, len(logits_indices), None,
        )  # fmt: skip
        self._model.library.rayfleet_head_forward(
            self._handle, ctypes.byref(step), hidden.data_ptr(), outputs.data_ptr()
        )
        return outputs

    def draft(self, step: StepRows, drafting: Drafting) -> None:
        """Drafts tokens after each single-token row, and writes them to the arrays of
        NativeDrafter."""
        assert self._handle is not None, "bind must be called first"
        self._model.library.rayfleet_head_draft(
            self._handle, ctypes.byref(step), ctypes.byref(drafting)
        )

    def close(self) -> None:
        """Frees the memory that the library holds for the head. Safe to call twice."""
        if self._handle is not None:
            self._model.library.rayfleet_destroy_head(self._handle)
            self._handle = None
