"""How linear layers hold their weights: as values of the model's type, or as codes with scales.

    LinearMethod.allocate ──> LinearWeight ──slots──> (the loader fills them)
                                   ├──pack──> PackedLinear, which multiplies
                                   ├──pack_experts──> ExpertWeights, for `fused_moe`
                                   └──dense──> the weight for the compiled CPU library

A layer knows which part of which tensor it needs and nothing of formats. A mixture of experts has
one weight whose parts are those of all experts, one after another. Quantized weights are in
`quantized_linear.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kernels import ExpertWeights, PackedLinear, pack_linear_weight
from worker.models.tensor_parallel import TensorParallelGroup

VALUE_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of tensors that hold values as they are, in the words of safetensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """The slot of one tensor of the checkpoint: where it goes, and which slice of it this rank
    needs."""

    name: str
    """Name in the checkpoint."""
    destination: torch.Tensor
    """A view into the layer's own tensor, of the slice's shape."""
    full_shape: tuple[int, ...]
    """Shape in the checkpoint."""
    dim: int = 0
    """Dimension that is sliced."""
    start: int = 0
    """First index of the slice; its length is the destination's."""
    source_types: tuple[str, ...] = VALUE_TYPES
    """Types that the checkpoint's tensor may have."""
    offset: float = 0.0
    """Number that is added to the checkpoint's values."""
    read_shape: tuple[int, ...] | None = None
    """Shape of the slice as the file has it, where the destination has more dimensions."""
    may_lack_ones: bool = False
    """Whether the checkpoint's tensor may lack the last dimensions where these are 1."""
    draw: Callable[[torch.Tensor], object] | None = None
    """Fills the destination where weights are random; None where they are drawn as of any layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """The part of a rank's weight [out, in] of one layer that one of the checkpoint's weights
    fills."""

    name: str
    """Name in the checkpoint, from the layer's own name on and without ".weight"."""
    full_shape: tuple[int, int]
    """Shape in the checkpoint."""
    rows: slice
    """Its rows of the rank's weight."""
    dim: int
    """Dimension of the checkpoint's weight that the ranks share: 0 output, 1 input features."""
    start: int
    """First index of this rank's share."""


class LinearWeight(ABC):
    """One layer's weight on one rank, until it is packed."""

    @abstractmethod
    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensors that the checkpoint must hold; `prefix` stands before the parts' names."""

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """The loaded weight [out, in] in the model's type."""

    @abstractmethod
    def reorder(self, rows: torch.Tensor) -> None:
        """Puts the loaded rows into the order of `rows` [out], indices on the host."""

    @abstractmethod
    def pack(self) -> PackedLinear:
        """The loaded weight in the form that it is multiplied in."""

    @abstractmethod
    def pack_experts(self, num_experts: int) -> ExpertWeights:
        """The loaded weight [num_experts * out, in] in the form that `fused_moe` reads."""


class LinearMethod(ABC):
    """A format of linear weights."""

    @abstractmethod
    def allocate(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> LinearWeight:
        """A weight [out, in] to be filled.

        Args:
            shape: of the rank's weight.
            parts: what it consists of, from its first row to its last.
            options: of the model's layers.
        """


class UnquantizedMethod(LinearMethod):
    """Values of the model's type."""

    def allocate(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> LinearWeight:
        """One tensor, which all parts share."""
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
                dim=part.dim,
                start=part.start,
            )

    def dense(self) -> torch.Tensor:
        return self._values

    def reorder(self, rows: torch.Tensor) -> None:
        self._values = self._values[rows.to(self._values.device)]

    def pack(self) -> PackedLinear:
        return pack_linear_weight(self._values, batch_invariant=self._options.batch_invariant)

    def pack_experts(self, num_experts: int) -> ExpertWeights:
        return ExpertWeights(self._values.view(num_experts, -1, self._values.shape[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Options that all layers of a model on one rank have in common."""

    group: TensorParallelGroup
    dtype: torch.dtype
    """Type of activations, and of weights that are not quantized."""
    device: torch.device
    batch_invariant: bool
    """Whether a token's result must not depend, in any bit, on what else the step computes."""
    expert_parallel: bool = False
    """Whether ranks hold experts whole, each some of them, and not a share of every one."""
    linear_method: LinearMethod = field(default_factory=UnquantizedMethod)
    """The format of linear weights."""


def check_words(
    name: str, start: int, count: int, full: int, size: int, options: LayerOptions
) -> None:
    """Raises ValueError where `count` of `full` features of a module, from `start` on, do not begin
    and end with words of `size` codes."""
    if start % size or count % size or full % size:
        raise ValueError(
            f"--tensor-parallel-size {options.group.world_size} leaves a rank {count} of {full} "
            f"features of {name or 'a projection'}, not whole words of {size} codes: choose a "
            "smaller one, or an unquantized checkpoint"
        )
