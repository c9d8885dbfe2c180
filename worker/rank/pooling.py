"""Pooler: vectors of requests to a pooling model, from the hidden states of a step's rows.

    last    the row that computes the last token yields the vector
    mean    each row adds its hidden states to the sum of its slot
    cls     the row that computes the first token stores its hidden state in the slot

HAZARD(invariance): a vector must not depend on other rows, nor on how the prompt was divided into
chunks. Sums over tokens are sums of integers; everything after them is computed in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.config.pooling import PoolerConfig
from worker.models.layers.pooling_head import PoolingHead
from worker.plan.plan import Plan
from worker.protocol.pooling import PoolingInfo, PoolingParams
from worker.rank.batch import Batch
from worker.rank.transfer import IntArray, to_device

_FRACTION_BITS = 30
"""Number of bits after the binary point of summed hidden states. The resolution, 1e-9, is that of
fp32 values near 0.01. Sums overflow beyond 8.6e9: a mean of 8,600 over a million tokens."""
_SQUARE_BITS = 48
"""Number of bits after the binary point of summed squares, each at most 1: sums of 32,768 terms do
not overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of a pooled request."""

    index: int
    """Index of the row in the Plan."""
    slot: int
    first_token: int
    """Index of the row's first token among the step's tokens."""
    is_first: bool
    """Whether the row computes the request's first token."""
    is_last: bool
    """Whether the row computes the request's last token."""
    length: int
    params: PoolingParams
    num_prompt: int
    """Number of tokens of the request's prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRows:
    """Rows of a step that are pooled."""

    rows: Sequence[_Row]
    tokens: IntArray | None
    """[n]: indices of the step's tokens whose hidden states are needed; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledVectors:
    """Vectors of a step's rows, on the device or being copied to the host."""

    indices: Sequence[int]
    """[n]: indices of the rows in the Plan."""
    vectors: torch.Tensor
    """[n, size] fp32: the vectors."""
    sizes: Sequence[int]
    """[n]: number of leading elements of each vector that were requested."""

    def to_bytes(self) -> dict[int, bytes]:
        """Little-endian float32 by row index; the vectors must be on the host."""
        vectors = self.vectors.numpy().astype("<f4")
        rows = zip(self.indices, vectors, self.sizes, strict=True)
        return {index: vector[:size].tobytes() for index, vector, size in rows}


class Pooler:
    """Keeps the state of pooled requests by slot, and computes their vectors.

    Args:
        info: the model's pooling properties.
        head: classification head; None for embeddings.
        hidden_size: size of hidden states.
        num_slots: maximum number of running requests.
        device: the rank's device.
        has_pair_types: whether the second text of a pair has a different token type.
    """

    def __init__(
        self,
        info: PoolingInfo,
        head: PoolingHead | None,
        *,
        hidden_size: int,
        num_slots: int,
        device: torch.device,
        has_pair_types: bool = False,
    ) -> None:
        self._info = info
        self._head = head
        self._device = device
        self._has_pair_types = has_pair_types
        self._requests: dict[int, tuple[PoolingParams, int]] = {}
        """Parameters and number of prompt tokens by slot."""
        self._second_texts: dict[int, int] = {}
        """Index of the second text's first token, by slot of a request that has token types."""
        self._states: torch.Tensor | None = None
        """[slots, hidden]: sums in fixed point (mean), or hidden states of the first tokens
        (cls)."""
        if info.pooling_type != "last":
            kind = torch.int64 if info.pooling_type == "mean" else torch.float64
            self._states = torch.zeros(num_slots, hidden_size, dtype=kind, device=device)

    @classmethod
    def of(cls, model: DecoderModel, pooling: PoolerConfig, num_slots: int) -> Self:
        """The pooler of a model; `num_slots` as in Pooler."""
        extra = model.config.extra or {}
        return cls(
            *(pooling.info, model.pooling_head),
            hidden_size=model.config.hidden_size,
            num_slots=num_slots,
            device=model.options.device,
            has_pair_types=pooling.info.task == "classify"
            and bool(extra.get("has_pair_types"))
            and extra["type_vocab_size"] > 1,
        )

    def prepare(self, plan: Plan) -> PooledRows:
        """Records a Plan's admissions; returns its rows of pooled requests. Must be called once per
        Plan."""
        for admit in plan.admits:
            if admit.pooling is not None:
                self._requests[admit.slot] = admit.pooling, len(admit.token_ids) // 4
                self._second_texts.pop(admit.slot, None)
                if self._has_pair_types and admit.second_text:
                    self._second_texts[admit.slot] = admit.second_text
        rows, first_token = list[_Row](), 0
        for index, row in enumerate(plan.rows):
            params, num_prompt = self._requests.get(row.slot, (None, 0))
            if params is not None:
                rows.append(
                    _Row(
                        index=index,
                        slot=row.slot,
                        first_token=first_token,
                        is_first=row.start == 0,
                        is_last=row.start + row.length == num_prompt,
                        length=row.length,
                        params=params,
                        num_prompt=num_prompt,
                    )
                )
            first_token += row.length
        if self._info.pooling_type == "mean" or not rows:  # without rows, a memory-profiling step
            return PooledRows(rows=rows, tokens=None)
        if self._info.pooling_type == "cls":
            tokens = [row.first_token for row in rows if row.is_first]
        else:
            tokens = [row.first_token + row.length - 1 for row in rows if row.is_last]
        return PooledRows(rows=rows, tokens=np.array(tokens, dtype=np.int64))

    def pool(self, hidden: torch.Tensor, step: PooledRows) -> PooledVectors | None:
        """Vectors of the rows that compute their request's last token; None if there are none.

        Args:
            hidden: [n, hidden] of the step's `tokens`, or [T, hidden] of all tokens.
            step: the step's rows.
        """
        last = [row for row in step.rows if row.is_last]
        if self._info.pooling_type == "mean":
            for row in step.rows:
                self._add(row, hidden[row.first_token : row.first_token + row.length])
        elif self._states is not None and step.tokens is not None:
            first = [row.slot for row in step.rows if row.is_first]
            slots = to_device(torch.tensor(first, dtype=torch.int64), self._device)
            self._states.index_copy_(0, slots, hidden.double())
        if not last:
            return None
        pooled = hidden.double() if self._states is None else self._finished(self._states, last)
        if self._head is not None:
            vectors = self._head.forward(pooled)
            sizes = [vectors.shape[1]] * len(last)
        else:
            sizes = [row.params.dimensions or pooled.shape[1] for row in last]
            vectors = self._embeddings(pooled, sizes, [row.params.normalize for row in last])
        indices = [row.index for row in last]
        return PooledVectors(indices=indices, vectors=vectors.float(), sizes=sizes)

    def select(self, batch: Batch, step: PooledRows) -> Batch:
        """Limits a step's batch to the hidden states that pooling needs; returns the new batch."""
        if step.tokens is None:
            return batch
        arrays = {} if batch.adapters is None else batch.adapters.selected(step.tokens)
        adapters = {
            name: to_device(torch.from_numpy(array), self._device) for name, array in arrays.items()
        }
        indices = to_device(torch.from_numpy(step.tokens), self._device)
        return replace(batch, logits_indices=indices, selected_adapters=adapters or None)

    def token_types(self, rows: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Token types [T] int64 of a step's tokens; None if all are 0.

        Args:
            rows: [R, 3 or more]: slot, first position and number of tokens of each row.
        """
        if not self._second_texts:
            return None
        types = [
            np.arange(start, start + length) >= self._second_texts.get(slot, start + length)
            for slot, start, length in rows[:, :3].tolist()
        ]
        return to_device(torch.from_numpy(np.concatenate(types).astype(np.int64)), self._device)

    def _add(self, row: _Row, hidden: torch.Tensor) -> None:
        """Adds a row's hidden states [length, hidden] to the sum of its slot."""
        assert self._states is not None, "means need sums"
        state = self._states[row.slot]
        if row.is_first:
            state.zero_()
        state += (hidden.double() * 2.0**_FRACTION_BITS).round().long().sum(dim=0)

    def _finished(self, states: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        """Pooled hidden states, fp64 [n, hidden], from the states of the rows' slots."""
        slots = to_device(torch.tensor([row.slot for row in rows]), self._device)
        pooled = states.index_select(0, slots).double()
        if self._info.pooling_type == "cls":
            return pooled
        counts = torch.tensor([row.num_prompt for row in rows], dtype=torch.float64)
        return pooled / (to_device(counts, self._device).unsqueeze(1) * 2.0**_FRACTION_BITS)

    def _embeddings(
        self, pooled: torch.Tensor, sizes: Sequence[int], normalize: Sequence[bool | None]
    ) -> torch.Tensor:
        """Embeddings, fp64 [n, hidden], from pooled hidden states. Each uses only as many leading
        elements as its entry in `sizes`, and is L2-normalized if its entry in `normalize` is true
        (the model's default if None)."""
        default = self._info.normalize
        scaled = [default if one is None else one for one in normalize]
        if not any(scaled):
            return pooled
        limits = to_device(torch.tensor(sizes), self._device).unsqueeze(1)
        columns = torch.arange(pooled.shape[1], device=self._device)
        pooled = pooled.masked_fill(columns >= limits, 0.0)
        largest = pooled.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        squares = ((pooled / largest).square() * 2.0**_SQUARE_BITS).round().long()
        sums = squares.sum(dim=1, keepdim=True).double() * 2.0**-_SQUARE_BITS
        unscaled = ~to_device(torch.tensor(scaled), self._device).unsqueeze(1)
        return pooled / (largest * sums.sqrt()).masked_fill(unscaled, 1.0)
