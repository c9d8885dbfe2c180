"""Linear methods: formats of linear-layer weights, unquantized or quantized.

    LinearMethod.allocate ──> LinearWeight ──slots──> (the loader fills them)
                                   ├──pack──> PackedLinear, for `linear`
                                   ├──pack_experts──> ExpertWeights, for `fused_moe`
                                   └──dense──> the weight for the compiled CPU library

A layer specifies which part of which tensor it needs, independently of the format. A mixture of
experts has one weight with the parts of all experts, concatenated. Quantized weights are in
`quantized_linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kernels import ExpertWeights, PackedLinear, pack_linear_weight
from worker.models.layers.tensor_parallel import TensorParallelGroup

VALUE_TYPES = ("F64", "F32", "F16", "BF16")
"""Data types of unquantized tensors, as safetensors names them."""


class LinearModule(NamedTuple):
    """A linear layer and its location in the model."""

    layer: object
    """The `Linear` layer, whose class this file does not import."""
    prefix: str
    """Prefix of the names of the layer's tensors in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """Position of a matrix, or of its scales, in a tensor of the checkpoint that stacks several
    along an additional first dimension."""

    index: int
    """Index of the matrix in the tensor."""
    count: int
    """Number of matrices in the tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """Slot for one tensor of the checkpoint: its destination, and this rank's slice."""

    name: str
    """Name in the checkpoint."""
    destination: torch.Tensor
    """View of the layer's tensor, with the shape of the slice."""
    full_shape: tuple[int, ...]
    """Shape in the checkpoint, or of one of its matrices if the tensor stacks several."""
    stacked: Stacked | None = None
    """Which matrix to read from a tensor that stacks several; None if the tensor holds a single
    matrix."""
    dim: int = 0
    """Dimension that is sliced."""
    start: int = 0
    """First index of the slice; its length is the destination's."""
    source_types: tuple[str, ...] = VALUE_TYPES
    """Supported data types of the checkpoint's tensor."""
    offset: float = 0.0
    """Offset added to the checkpoint's values."""
    read_shape: tuple[int, ...] | None = None
    """Shape of the slice in the file, if the destination has more dimensions; otherwise None."""
    may_lack_ones: bool = False
    """Whether the checkpoint's tensor may omit trailing dimensions of size 1."""
    is_optional: bool = False
    """Whether the tensor may be missing from the checkpoint, in which case the destination is
    unchanged."""
    fill_dummy: Callable[[torch.Tensor], object] | None = None
    """Fills the destination with dummy weights; None for the loader's default."""
    module: LinearModule | None = None
    """Linear layer whose weight the tensor is a part of; None for other tensors."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.full_shape if self.stacked is None else (self.stacked.count, *self.full_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """Part of a layer's weight [out, in] on one rank, filled from one weight of the checkpoint."""

    name: str
    """Name in the checkpoint, relative to the layer and without ".weight"."""
    full_shape: tuple[int, int]
    """Shape in the checkpoint."""
    rows: slice
    """Rows of the rank's weight that the part fills."""
    dim: int
    """Dimension of the checkpoint's weight that is divided among ranks: 0 for output features, 1
    for input features."""
    start: int
    """First index of this rank's slice of that dimension."""
    section: int = 0
    """Number of rows in the checkpoint after which blocks of scales restart; 0 for none. A part
    is within one section."""
    stacked: Stacked | None = None
    """Place of the weight, such as an expert's, in tensors that stack several weights; None if each
    weight has its own tensor."""

    def first_block(self, size: int) -> int:
        """Number of blocks of `size` rows or columns before this rank's slice."""
        if not (self.section and self.dim == 0):
            return self.start // size
        sections, rest = divmod(self.start, self.section)
        return sections * -(-self.section // size) + rest // size

    def num_blocks(self, sizes: tuple[int, int]) -> tuple[int, int]:
        """Numbers of blocks in the checkpoint's weight along rows and columns, given the blocks'
        `sizes`."""
        rows, columns = self.full_shape
        section = self.section or rows
        return rows // section * -(-section // sizes[0]), -(-columns // sizes[1])


class LinearWeight(ABC):
    """Weight of one layer on one rank, from allocation until it is packed."""

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots for the tensors that the checkpoint must contain; `prefix` precedes the
        parts' names."""

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """The loaded weight [out, in], dequantized, in the model's data type."""

    def destination(self) -> torch.Tensor:
        """Tensor [out, in] that the loader fills, for checkpoints that do not store the parts as in
        `slots`.

        Raises:
            ValueError: the weight is quantized in the checkpoint.
        """
        raise ValueError(
            "quantized experts that are stacked in one tensor are not supported: use the "
            "checkpoint's unquantized version"
        )

    @abstractmethod
    def reorder(self, rows: torch.Tensor) -> None:
        """Reorders the loaded rows by the indices `rows` [out], on the host."""

    @abstractmethod
    def pack(self) -> PackedLinear:
        """Packs the loaded weight for `linear`."""

    @abstractmethod
    def pack_experts(self, num_experts: int) -> ExpertWeights:
        """Packs the loaded weight [num_experts * out, in] for `fused_moe`."""


class LinearMethod(ABC):
    """A format of linear weights."""

    @abstractmethod
    def allocate(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> LinearWeight:
        """Allocates a weight [out, in] for the loader to fill.

        Args:
            shape: shape of the rank's weight.
            parts: parts of the weight, from its first row to its last.
            options: options of the model's layers.
        """


class UnquantizedMethod(LinearMethod):
    """Unquantized weights, in the model's data type."""

    def allocate(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> LinearWeight:
        """Allocates one tensor for all parts."""
        return _UnquantizedWeight(shape, parts, options)


class _UnquantizedWeight(LinearWeight):
    def __init__(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> None:
        self._parts = parts
        self._options = options
        self._values = torch.empty(shape, dtype=options.dtype, device=options.device)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part in self._parts:
            yield WeightSlot(
                name=f"{prefix}{part.name}.weight",
                destination=self._values[part.rows],
                full_shape=part.full_shape,
                stacked=part.stacked,
                dim=part.dim,
                start=part.start,
            )

    def dense(self) -> torch.Tensor:
        return self._values

    def destination(self) -> torch.Tensor:
        return self._values

    def reorder(self, rows: torch.Tensor) -> None:
        self._values = self._values[rows.to(self._values.device)]

    def pack(self) -> PackedLinear:
        return pack_linear_weight(self._values, batch_invariant=self._options.batch_invariant)

    def pack_experts(self, num_experts: int) -> ExpertWeights:
        return ExpertWeights(self._values.view(num_experts, -1, self._values.shape[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Options that all layers of a model on one rank share."""

    group: TensorParallelGroup
    dtype: torch.dtype
    """Data type of activations, and of weights that are not quantized."""
    device: torch.device
    batch_invariant: bool
    """Whether a token's result must be bitwise independent of the rest of the batch."""
    expert_parallel: bool = False
    """Whether each rank holds whole experts (expert parallelism) instead of columns of all."""
    linear_method: LinearMethod = field(default_factory=UnquantizedMethod)
    """Format of linear weights."""
    quantizes_fp8: bool = False
    """Whether weights that are unquantized in the checkpoint are quantized to FP8 when loaded."""
    cache_dtype: torch.dtype | None = None
    """Data type of the KV cache if it differs from `dtype` (FP8); otherwise None."""


def check_words(
    name: str, start: int, count: int, full: int, size: int, options: LayerOptions
) -> None:
    """Checks that a rank's features consist of whole packed words.

    Args:
        name: name of the weight, for the message.
        start: first feature on this rank.
        count: number of features on this rank.
        full: number of features in the checkpoint.
        size: number of codes per word.
        options: options of the model's layers.

    Raises:
        ValueError: the weight would be split within a word.
    """
    if start % size or count % size or full % size:
        raise ValueError(
            f"--tensor-parallel-size {options.group.world_size} gives each rank {count} of {full} "
            f"features of {name or 'a projection'}, not a multiple of {size}: use a smaller "
            "--tensor-parallel-size, or an unquantized checkpoint"
        )
