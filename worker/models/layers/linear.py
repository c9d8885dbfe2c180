"""Linear layers and embeddings with tensor parallelism: each rank holds a slice of the weights.

Layers are plain objects with an explicit `forward`: a step on CPU runs hundreds of them, and the
overhead of `torch.nn.Module` would exceed the time of some matmuls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kernels import Fp8Inputs, Fp8Rows, PackedLinear, linear, pack_linear_weight
from worker.models.layers.linear_method import (
    LayerOptions,
    LinearModule,
    LinearWeight,
    UnquantizedMethod,
    WeightPart,
    WeightSlot,
)
from worker.models.layers.lora import LoraEmbedding, LoraLayer
from worker.models.layers.sharing import divide

Rows = torch.Tensor | Fp8Rows
"""Input of a linear layer [T, in]: unquantized, or quantized to FP8 as described by its
`fp8_inputs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnPart:
    """One weight of a checkpoint in a column-parallel layer, which may fuse several weights."""

    name: str
    """Name in the checkpoint, within the layer's block."""
    full_size: int
    """Number of output features in the checkpoint."""
    local_size: int
    """Number of output features on this rank."""
    start: int
    """Index in the checkpoint of this rank's first output feature."""
    section: int = 0
    """Number of output features in the checkpoint after which blocks of scales restart; 0 if
    they never do."""


def divided_part(name: str, size: int, options: LayerOptions) -> ColumnPart:
    """A part whose output features are divided evenly among the ranks.

    Raises:
        ValueError: the size is not a multiple of the number of ranks.
    """
    local = divide(size, options.group.world_size, f"the output size of {name}")
    return ColumnPart(name=name, full_size=size, local_size=local, start=options.group.rank * local)


def whole_part(name: str, size: int) -> ColumnPart:
    """A part that is replicated on every rank."""
    return ColumnPart(name=name, full_size=size, local_size=size, start=0)


class Linear:
    """Weight [out, in] of a linear layer on one rank, in any format, and bias [out]."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[WeightPart],
        bias: bool,
        options: LayerOptions,
        supports_lora: bool,
    ) -> None:
        out_features = parts[-1].rows.stop
        self.shape = (out_features, in_features)
        """Shape of the rank's weight, [out, in]."""
        self.parts = tuple(parts)
        """Parts of the weight, from its first row to its last."""
        self.supports_lora = supports_lora
        """Whether the layer may have LoRA adapters: its input has a row per token of the step, or
        of `logits_indices`."""
        self.lora: LoraLayer | None = None
        """LoRA adapters of the layer; None if LoRA is disabled."""
        self.order: torch.Tensor | None = None
        """Indices by which the output features are reordered, [out]; None if they are not
        reordered."""
        self._dtype = options.dtype
        self._group = options.group
        self._batch_invariant = options.batch_invariant
        self._weight: LinearWeight | None = options.linear_method.allocate(
            (out_features, in_features), parts, options
        )
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = torch.empty(out_features, dtype=options.dtype, device=options.device)
        self._packed: PackedLinear

    @property
    def weight(self) -> LinearWeight:
        """The weight before it is packed."""
        assert self._weight is not None, "packed already"
        return self._weight

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that the layer supports; None if it only accepts unquantized rows. It is
        only known after the weight is packed."""
        return None if self.lora is not None else self._packed.fp8_inputs

    def _weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the weight, each with a reference to this layer; `prefix` precedes the parts'
        names."""
        module = LinearModule(self, prefix)
        for slot in self.weight.slots(prefix):
            yield replace(slot, module=module)

    def shape_of_weight(self) -> torch.Tensor:
        """A tensor with the shape and type of the dense weight [out, in], without storage."""
        return torch.empty(self.shape, dtype=self._dtype, device="meta")

    def process_after_loading(self) -> None:
        """Packs the loaded weight for matmuls, and drops the original."""
        self._packed = self.weight.pack()
        self._weight = None

    def reorder(self, rows: torch.Tensor) -> None:
        """Reorders the loaded output features by the indices `rows` [out]."""
        self.weight.reorder(rows)
        self.order = rows
        if self.bias is not None:
            self.bias = self.bias[rows.to(self.bias.device)]

    def drop(self) -> None:
        """Drops the loaded weight without packing it."""
        self._weight = None


class ColumnParallelLinear(Linear):
    """Linear layer whose output features are divided among the ranks. Several projections of the
    same input may be fused.

    Args:
        in_features: number of input features.
        parts: the projections, concatenated.
        bias: whether the projections have biases.
        options: options of the model's layers.
        supports_lora: as in Linear.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[ColumnPart],
        *,
        bias: bool,
        options: LayerOptions,
        supports_lora: bool = False,
    ) -> None:
        weight_parts: list[WeightPart] = []
        for part in parts:
            first = weight_parts[-1].rows.stop if weight_parts else 0
            weight_parts.append(
                WeightPart(
                    name=part.name,
                    full_shape=(part.full_size, in_features),
                    rows=slice(first, first + part.local_size),
                    dim=0,
                    start=part.start,
                    section=part.section,
                )
            )
        super().__init__(in_features, weight_parts, bias, options, supports_lora)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of all parts and their biases; `prefix` ends with a dot."""
        yield from self._weight_slots(prefix)
        if self.bias is None:
            return
        for part in self.parts:
            yield WeightSlot(
                name=f"{prefix}{part.name}.bias",
                destination=self.bias[part.rows],
                full_shape=part.full_shape[:1],
                start=part.start,
            )

    def forward(self, x: Rows) -> torch.Tensor:
        """Maps inputs [T, in] to the concatenated outputs of all parts, [T, sum of the parts' local
        sizes]."""
        out = linear(x, self._packed, self.bias)
        return out if self.lora is None else self.lora.add_(out, x)


def build_router(
    hidden_size: int, scores: Mapping[str, int], options: LayerOptions, *, bias: bool = False
) -> ColumnParallelLinear:
    """Builds a router, which computes the scores of experts and is replicated on every rank.

    Weights and input are fp32, so that the choice of experts does not depend on the rounding of
    activations.

    Args:
        hidden_size: size of the input.
        scores: number of scores that each weight computes, by the weight's name in a checkpoint.
        options: options of the model's layers.
        bias: whether the weights have biases.
    """
    options = replace(options, dtype=torch.float32, linear_method=UnquantizedMethod())
    parts = [
        ColumnPart(name=name, full_size=count, local_size=count, start=0)
        for name, count in scores.items()
    ]
    return ColumnParallelLinear(hidden_size, parts, bias=bias, options=options)


class RowParallelLinear(Linear):
    """Linear layer whose input features are divided among the ranks; the ranks' outputs are summed.

    Args:
        in_features: total number of input features on all ranks.
        out_features: number of output features.
        bias: whether the layer has a bias.
        options: options of the model's layers.
        supports_lora: as in Linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        options: LayerOptions,
        supports_lora: bool = False,
    ) -> None:
        world_size = options.group.world_size
        local = divide(in_features, world_size, "the input size of a row-parallel layer")
        part = WeightPart(
            name="",
            full_shape=(out_features, in_features),
            rows=slice(0, out_features),
            dim=1,
            start=options.group.rank * local,
        )
        super().__init__(local, (part,), bias, options, supports_lora)
        self._alone = world_size == 1

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """Weight slots for `name`.weight and for `name`.bias, which is replicated on every rank."""
        yield from self._weight_slots(name)
        if self.bias is not None:
            yield WeightSlot(
                name=f"{name}.bias",
                destination=self.bias,
                full_shape=tuple(self.bias.shape),
            )

    def forward(self, x: Rows) -> torch.Tensor:
        """Maps inputs [T, local in] to outputs [T, out], summed over the ranks."""
        if self._alone:
            return self._share(x, self.bias)
        total = self._group.all_reduce(self._share(x, None), fixed_order=self._batch_invariant)
        return total if self.bias is None else total + self.bias

    def forward_share(self, x: Rows) -> torch.Tensor:
        """Maps inputs [T, local in] to this rank's partial output [T, out]; the caller sums over
        ranks."""
        return self._share(x, self.bias if self._group.rank == 0 else None)

    def _share(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies by this rank's weights and, since the all-reduce is linear, adds this rank's
        share of the tokens' LoRA outputs."""
        out = linear(x, self._packed, bias)
        return out if self.lora is None else self.lora.add_(out, x)


class VocabParallelEmbedding:
    """Embedding whose vocabulary, padded to a multiple of the number of ranks, is divided among
    them."""

    def __init__(self, vocab_size: int, hidden_size: int, options: LayerOptions) -> None:
        self._group = options.group
        self.shape = (vocab_size, hidden_size)
        """Shape of the whole embedding."""
        self.lora: LoraEmbedding | None = None
        """LoRA adapters of the embedding; None if LoRA is disabled."""
        self.local_size = -(-vocab_size // options.group.world_size)
        self.start = options.group.rank * self.local_size
        self._num_rows = max(0, min(self.local_size, vocab_size - self.start))
        self.weight = torch.empty(
            self.local_size, hidden_size, dtype=options.dtype, device=options.device
        )
        self.weight[self._num_rows :].zero_()  # untouched pages are not allocated

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """The weight slot for `name`.weight; its slice is empty on a rank that only has padding."""
        yield WeightSlot(
            name=f"{name}.weight",
            destination=self.weight[: self._num_rows],
            full_shape=self.shape,
            start=min(self.start, self.shape[0]),
        )

    def drop(self) -> None:
        """Drops the loaded weight after the compiled CPU library has packed it."""
        self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to embeddings [T, hidden]. Each rank looks up tokens in its part of
        the vocabulary and returns zeros for others; the results are summed over ranks."""
        if self._group.world_size == 1:
            out = self.weight.index_select(0, input_ids)
            return out if self.lora is None else self.lora.add_(out, input_ids)
        local = input_ids - self.start
        foreign = (local < 0) | (local >= self.local_size)
        local = local.masked_fill(foreign, 0)
        rows = self.weight.index_select(0, local).masked_fill_(foreign.unsqueeze(1), 0)
        if self.lora is not None:
            rows = self.lora.add_(rows, local, foreign)
        return self._group.all_reduce(rows)

    def average(self, shares: torch.Tensor) -> torch.Tensor:
        """Maps distributions over tokens [T, vocabulary], in the data type of the weight, to
        weighted averages of embeddings [T, hidden]."""
        local = shares[:, self.start : self.start + self._num_rows]
        averages = local @ self.weight[: self._num_rows]
        return averages if self._group.world_size == 1 else self._group.all_reduce(averages)


class ParallelLMHead:
    """LM head whose vocabulary is divided among the ranks.

    Args:
        vocab_size: number of tokens.
        hidden_size: size of hidden states.
        options: options of the model's layers.
        tied: whether the weight is the embedding's.
        has_bias: whether logits have a bias.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        options: LayerOptions,
        *,
        tied: bool,
        has_bias: bool = False,
    ) -> None:
        self.shape = (-(-vocab_size // options.group.world_size), hidden_size)
        """Shape of the rank's weight, whose last rows may be padding."""
        self.lora: LoraLayer | None = None
        """LoRA adapters of the LM head; None if LoRA is disabled."""
        self._group = options.group
        self._vocab_size = vocab_size
        self._batch_invariant = options.batch_invariant
        self._untied = None if tied else VocabParallelEmbedding(vocab_size, hidden_size, options)
        self._bias: torch.Tensor | None = None
        if has_bias:
            self._bias = torch.zeros(self.shape[0], dtype=options.dtype, device=options.device)
        self._packed: PackedLinear

    def weight_slots(self, name: str) -> Iterator[WeightSlot]:
        """Weight slots for `name`.weight, unless it is the embedding's, and for `name`.bias."""
        if self._untied is not None:
            yield from self._untied.weight_slots(name)
        if self._bias is not None:
            start = min(self._group.rank * len(self._bias), self._vocab_size)
            yield WeightSlot(
                name=f"{name}.bias",
                destination=self._bias[: self._vocab_size - start],
                full_shape=(self._vocab_size,),
                start=start,
            )

    def process_after_loading(self, embedding: VocabParallelEmbedding) -> None:
        """Packs the loaded weight, or the embedding's if the two are tied."""
        weight = self.source(embedding).weight
        self._packed = pack_linear_weight(weight, batch_invariant=self._batch_invariant)
        self._untied = None

    def drop(self) -> None:
        """Drops the loaded weight without packing it."""
        self._untied = None

    def source(self, embedding: VocabParallelEmbedding) -> VocabParallelEmbedding:
        """The embedding object with the head's loaded weight: the head's own, or the model's if the
        two are tied."""
        return embedding if self._untied is None else self._untied

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [R, hidden] to fp32 logits [R, vocab_size]."""
        local = linear(hidden, self._packed, self._bias)
        return self.gather(local if self.lora is None else self.lora.add_(local, hidden))

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gathers the ranks' logits [R, local vocabulary] to fp32 [R, vocab_size]."""
        if self._group.world_size > 1:
            local = self._group.all_gather_last_dim(local)[:, : self._vocab_size]
        return local.float()
