"""Quantized linear weights: converts checkpoint layouts to a common layout of codes.

Loaded weights of every layout become codes [out, in] with scales, and possibly zero points, per
block of input features of each row (`kernels.BlockScales`). When packed for CUDA, they are
converted to the layout of the kernels, which dequantize them tile by tile or run FP8 matmuls. When
packed for CPU, they are dequantized. Unquantized checkpoints may be quantized when packed
(`online_fp8.py`).

To add a layout, derive from `_PartCodes` and add the class to `_PARTS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from kernels import (
    BlockScales,
    ExpertWeights,
    PackedLinear,
    WeightCode,
    dequantize,
    pack_linear_weight,
    pack_quantized_experts,
    pack_quantized_linear_weight,
)
from worker.models.config.multimodal import TensorNames
from worker.models.config.quantization import (
    Fp4Config,
    GptOssMxfp4Config,
    GroupedIntConfig,
    QuantizationConfig,
    ScaledConfig,
    WeightConfig,
)
from worker.models.layers.indexed_groups import IndexedCodes
from worker.models.layers.linear_method import (
    VALUE_TYPES,
    LayerOptions,
    LinearMethod,
    LinearWeight,
    UnquantizedMethod,
    WeightPart,
    WeightSlot,
    check_words,
)
from worker.models.layers.online_fp8 import OnlineFp8Method


def create_linear_method(
    config: QuantizationConfig | None, tensors: TensorNames | None, *, quantizes_fp8: bool = False
) -> LinearMethod:
    """The linear method for a checkpoint.

    Args:
        config: quantization of the checkpoint; None if there is none.
        tensors: alternative names of tensors in the checkpoint; None for the family's.
        quantizes_fp8: whether an unquantized checkpoint is quantized to FP8 when loaded.
    """
    if config is None and quantizes_fp8:
        return OnlineFp8Method()
    if config is None or isinstance(config.weights, GptOssMxfp4Config):
        return UnquantizedMethod()
    return QuantizedMethod(config, tensors or TensorNames())


class QuantizedMethod(LinearMethod):
    """Quantized weights, with one format for all modules or one per module; modules that the
    checkpoint excludes are unquantized.

    Args:
        config: quantization of the checkpoint.
        tensors: alternative names of tensors in the checkpoint.
    """

    def __init__(self, config: QuantizationConfig, tensors: TensorNames) -> None:
        self._config = config
        self._tensors = tensors

    def allocate(
        self, shape: tuple[int, int], parts: Sequence[WeightPart], options: LayerOptions
    ) -> LinearWeight:
        """Returns a weight that is allocated when its slots are created: its format depends on the
        names of its modules, which are not known earlier."""
        return _NamedWeight(self, shape, parts, options)

    def create(
        self,
        shape: tuple[int, int],
        parts: Sequence[WeightPart],
        options: LayerOptions,
        prefix: str,
    ) -> LinearWeight:
        """Allocates a weight [out, in] in the format of its modules, whose names are `prefix` plus
        the parts' names."""
        config = self._config
        formats = [
            config.format_of(self._tensors.checkpoint_names(prefix + part.name)) for part in parts
        ]
        weights = formats[0]
        if any(other != weights for other in formats):
            return _JoinedWeight(
                [self.create(*_alone(part, shape[1]), options, prefix) for part in parts], options
            )
        if weights is None:
            return UnquantizedMethod().allocate(shape, parts, options)
        if isinstance(weights, GroupedIntConfig) and weights.has_index:
            fill_dummy = _constant(_SPREAD / _INT_SPREADS[weights.bits])
            joined = [IndexedCodes(part, shape[1], weights, options, fill_dummy) for part in parts]
            return _JoinedWeight(joined, options)
        return _QuantizedWeight(shape, parts, weights, options)


def _alone(part: WeightPart, columns: int) -> tuple[tuple[int, int], list[WeightPart]]:
    """Shape and parts of a weight that consists of one part of a fused weight."""
    count = part.rows.stop - part.rows.start
    return (count, columns), [replace(part, rows=slice(0, count))]


class _NamedWeight(LinearWeight):
    def __init__(
        self,
        method: QuantizedMethod,
        shape: tuple[int, int],
        parts: Sequence[WeightPart],
        options: LayerOptions,
    ) -> None:
        self._create = partial(method.create, shape, parts, options)
        self._weight: LinearWeight | None = None

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._weight is None:
            self._weight = self._create(prefix)
        return self._weight.slots(prefix)

    def dense(self) -> torch.Tensor:
        return self._loaded().dense()

    def reorder(self, rows: torch.Tensor) -> None:
        self._loaded().reorder(rows)

    def pack(self) -> PackedLinear:
        return self._loaded().pack()

    def pack_experts(self, num_experts: int) -> ExpertWeights:
        return self._loaded().pack_experts(num_experts)

    def _loaded(self) -> LinearWeight:
        assert self._weight is not None, "slots are created before the weight is loaded"
        return self._weight


class _Loaded(Protocol):
    """A weight that is loaded and then dequantized."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...

    def dense(self) -> torch.Tensor: ...


class _JoinedWeight(LinearWeight):
    """Fused weight whose parts differ in format, or whose format has no kernel; dequantized when
    packed.

    Args:
        weights: weights of the parts, from the first row to the last.
        options: options of the model's layers.
    """

    def __init__(self, weights: Sequence[_Loaded], options: LayerOptions) -> None:
        self._weights = weights
        self._options = options
        self._order: torch.Tensor | None = None
        """[out]: index of each row among the loaded rows; None if they are not reordered."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for weight in self._weights:
            yield from weight.slots(prefix)

    def dense(self) -> torch.Tensor:
        values = torch.cat([weight.dense() for weight in self._weights])
        return values if self._order is None else values[self._order]

    def reorder(self, rows: torch.Tensor) -> None:
        self._order = rows.to(self._options.device)

    def pack(self) -> PackedLinear:
        return pack_linear_weight(self.dense(), batch_invariant=self._options.batch_invariant)

    def pack_experts(self, num_experts: int) -> ExpertWeights:
        return ExpertWeights(self.dense().unflatten(0, (num_experts, -1)))


class _QuantizedWeight(LinearWeight):
    def __init__(
        self,
        shape: tuple[int, int],
        parts: Sequence[WeightPart],
        config: WeightConfig,
        options: LayerOptions,
    ) -> None:
        self._options = options
        rows, columns = shape
        is_half = isinstance(config, Fp4Config)
        is_half |= isinstance(config, GroupedIntConfig) and config.bits == 4
        self._codes = torch.empty(
            (rows, columns // 2 if is_half else columns), dtype=torch.uint8, device=options.device
        )
        create = _PARTS[type(config)]
        self._names = [part.name for part in parts]
        self._parts = [
            create(part, self._codes[part.rows], columns, config, options) for part in parts
        ]
        self._scaling: BlockScales | None = None
        """Scales and zero points of the codes, after loading."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, part in zip(self._names, self._parts, strict=True):
            yield from part.slots(prefix + name)

    def dense(self) -> torch.Tensor:
        scaling = self._loaded()
        return dequantize(self._codes, scaling, dtype=self._options.dtype)

    def reorder(self, rows: torch.Tensor) -> None:
        scaling, rows = self._loaded(), rows.to(self._codes.device)
        self._codes = self._codes[rows]
        zeros = None if scaling.zeros is None else scaling.zeros[rows]
        self._scaling = scaling._replace(scales=scaling.scales[rows], zeros=zeros, rows=1)

    def pack(self) -> PackedLinear:
        scaling = self._loaded()
        return pack_quantized_linear_weight(
            self._codes,
            scaling,
            dtype=self._options.dtype,
            batch_invariant=self._options.batch_invariant,
        )

    def pack_experts(self, num_experts: int) -> ExpertWeights:
        scaling = self._loaded()
        codes, scales = (
            rows.unflatten(0, (num_experts, -1)) for rows in (self._codes, scaling.scales)
        )
        zeros = None if scaling.zeros is None else scaling.zeros.unflatten(0, (num_experts, -1))
        weights = ExpertWeights(codes, scaling._replace(scales=scales, zeros=zeros))
        return pack_quantized_experts(weights, self._options.dtype)

    def _loaded(self) -> BlockScales:
        """Scales and zero points of the loaded codes, per row, because parts or ranks may begin
        within a block of rows."""
        if self._scaling is None:
            first = self._parts[0]
            scales, zeros = zip(*(part.finish() for part in self._parts), strict=True)
            self._scaling = BlockScales(
                torch.cat(scales),
                first.block[1],
                first.offset,
                first.code,
                None if zeros[0] is None else torch.cat(zeros),
                rows=first.block[0] if all(part.has_whole_blocks for part in self._parts) else 1,
            )
            self._parts = []  # frees words in the checkpoint's layout
        return self._scaling


class _PartCodes(ABC):
    """Codes of one weight of a checkpoint on one rank, during loading.

    Args:
        part: part of the rank's weight filled from the checkpoint's weight.
        codes: uint8 [rows, columns], or [rows, columns / 2] for 4 bits: the rank's codes, to be
            filled.
        columns: number of input features on this rank.
        block_shape: numbers of output and input features that share a scale; 0 for all.
        options: options of the model's layers.
    """

    code: WeightCode

    def __init__(
        self,
        part: WeightPart,
        codes: torch.Tensor,
        columns: int,
        block_shape: tuple[int, int],
        options: LayerOptions,
    ) -> None:
        self._part, self._codes, self._options = part, codes, options
        self._shape = (len(codes), columns)
        self.block = (
            block_shape[0] or part.full_shape[0],
            block_shape[1] or part.full_shape[1],
        )
        starts = [0, 0]
        starts[part.dim] = part.start
        self._starts = (starts[0], starts[1])
        self._row_offset = (starts[0] % (part.section or part.full_shape[0])) % self.block[0]
        self.offset = starts[1] % self.block[1]
        """Number of input features in the first block that precede this rank's."""
        self._scales = self._empty(
            -(-(self._row_offset + self._shape[0]) // self.block[0]),
            -(-(self.offset + columns) // self.block[1]),
        )
        """[blocks of rows, blocks of columns]: scales of this rank's blocks."""

    @property
    def has_whole_blocks(self) -> bool:
        """Whether this rank's rows consist of whole blocks."""
        return not (self._row_offset or self._shape[0] % self.block[0])

    @abstractmethod
    def slots(self, name: str) -> Iterator[WeightSlot]:
        """Slots of the tensors that the checkpoint must contain for module `name`."""

    @abstractmethod
    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fills the codes from the loaded tensors.

        Returns:
            Scales of each row, fp32 [rows, blocks], and zero points, uint8 [rows, blocks]; None if
            there are no zero points.
        """

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._options.device)

    def _slot(
        self,
        name: str,
        destination: torch.Tensor,
        per_cell: tuple[int, int] = (1, 1),
        *,
        is_transposed: bool = False,
        **extra: Any,
    ) -> WeightSlot:
        """Slot of a tensor with one element per block of output and input features.

        Args:
            name: name in the checkpoint.
            destination: this rank's elements, output features first.
            per_cell: numbers of output and input features per element.
            is_transposed: whether input features come first in the checkpoint's tensor.
            extra: further fields of the slot.
        """
        dim = self._part.dim
        full = self._part.num_blocks(per_cell)
        return WeightSlot(
            name=name,
            destination=destination.T if is_transposed else destination,
            full_shape=full[::-1] if is_transposed else full,
            stacked=self._part.stacked,
            dim=1 - dim if is_transposed else dim,
            start=self._part.first_block(per_cell[dim]),
            **extra,
        )

    def _rows(self, grid: torch.Tensor) -> torch.Tensor:
        """Expands values per block of rows [blocks, n] to values per row [rows, n]."""
        rows = grid.repeat_interleave(self.block[0], 0) if self.block[0] > 1 else grid
        return rows[self._row_offset : self._row_offset + self._shape[0]]

    def _check_words(self, dim: int, size: int) -> None:
        """Checks that this rank's features are whole words of `size` codes. Raises ValueError if
        they are not."""
        count, full = self._shape[dim], self._part.full_shape[dim]
        check_words(self._part.name, self._starts[dim], count, full, size, self._options)


class _ScaledCodes(_PartCodes):
    """FP8 (e4m3) or INT8 codes, one byte each."""

    def __init__(
        self,
        part: WeightPart,
        codes: torch.Tensor,
        columns: int,
        config: ScaledConfig,
        options: LayerOptions,
    ) -> None:
        self._config = config
        self.code = config.code
        super().__init__(part, codes, columns, config.block_shape, options)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        is_float = self._config.code == "e4m3"
        yield self._slot(
            f"{name}.weight",
            self._codes.view(torch.float8_e4m3fn if is_float else torch.int8),
            source_types=("F8_E4M3" if is_float else "I8",),
        )
        yield self._slot(
            f"{name}.{self._config.scale}",
            self._scales,
            self.block,
            may_lack_ones=0 in self._config.block_shape,
            source_types=("U8",) if self._config.has_exponents else VALUE_TYPES,
            fill_dummy=_constant(self._dummy_scale()),
        )

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = self._scales
        if self._config.has_exponents:
            scales = torch.exp2(scales - _EXPONENT_BIAS)
        return self._rows(scales), None

    def _dummy_scale(self) -> float:
        if self._config.has_exponents:
            return _EXPONENT_BIAS
        return 1.0 if self._config.code == "e4m3" else _SPREAD / _INT8_SPREAD


class _IntCodes(_PartCodes):
    """Integer codes, packed in 32-bit words along input features (AWQ: along output features)."""

    def __init__(
        self,
        part: WeightPart,
        codes: torch.Tensor,
        columns: int,
        config: GroupedIntConfig,
        options: LayerOptions,
    ) -> None:
        super().__init__(part, codes, columns, (1, config.group_size), options)
        self._config = config
        self.code = _INT_CODES[config.bits, config.has_zeros]
        rows, per_word = len(codes), 32 // config.bits
        self._per_word = per_word
        self._is_transposed = config.layout != "compressed-tensors"
        self._check_words(1, 2 if config.layout == "awq" else per_word)
        if config.has_zeros:
            self._check_words(0, per_word)
            groups = self._scales.shape[1]
            self._zeros = self._empty(rows // per_word, groups, dtype=torch.int32)
        if config.layout == "awq":
            self._words = self._empty(rows // per_word, columns, dtype=torch.int32)
        else:
            self._words = codes.view(torch.int32)
        inputs = torch.arange(columns, dtype=torch.int32, device=options.device)
        self._groups = (inputs + self._starts[1]) // self.block[1]
        """Expected group of each input feature in GPTQ's index."""
        self._loaded_groups = self._groups.clone()

    def slots(self, name: str) -> Iterator[WeightSlot]:
        config, per_word, group = self._config, self._per_word, self.block[1]
        names = {"weights": "qweight", "scales": "scales", "zeros": "qzeros"}
        if config.layout == "compressed-tensors":
            names = {
                "weights": "weight_packed",
                "scales": "weight_scale",
                "zeros": "weight_zero_point",
            }
        extra: dict[str, Any] = {"is_transposed": self._is_transposed}
        words: dict[str, Any] = {**extra, "source_types": ("I32",)}
        per_cell = (per_word, 1) if config.layout == "awq" else (1, per_word)
        yield self._slot(f"{name}.{names['weights']}", self._words, per_cell, **words)
        fill_dummy = _constant(_SPREAD / _INT_SPREADS[config.bits])
        yield self._slot(
            f"{name}.{names['scales']}", self._scales, (1, group), fill_dummy=fill_dummy, **extra
        )
        if config.has_zeros:
            middle = _constant({4: -0x77777778, 8: -0x7F7F7F80}[config.bits])
            yield self._slot(
                f"{name}.{names['zeros']}",
                self._zeros,
                (per_word, group),
                fill_dummy=middle,
                **words,
            )
        if config.layout == "gptq":
            yield WeightSlot(
                name=f"{name}.g_idx",
                destination=self._loaded_groups,
                full_shape=self._part.full_shape[1:],
                start=self._starts[1],
                source_types=("I32",),
                fill_dummy=lambda _: None,
            )

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_gptq = self._config.layout == "gptq"
        if is_gptq and not torch.equal(self._loaded_groups, self._groups):
            raise ValueError(
                "g_idx of GPTQ weights is not in the order of features, but desc_act is not set "
                "in config.json: set it to true"
            )
        if self._config.layout == "awq":
            for place, nibble in enumerate(_AWQ_ORDER):
                values = (self._words >> (4 * nibble) & 15).to(torch.uint8)
                self._codes[place::8] = values[:, 0::2] | (values[:, 1::2] << 4)
        zeros = self._unpacked_zeros() if self._config.has_zeros else None
        return self._scales, zeros

    def _unpacked_zeros(self) -> torch.Tensor:
        """Zero points, uint8 [rows, groups]."""
        bits, per_word = self._config.bits, self._per_word
        largest = 2**bits - 1
        zeros = self._empty(self._shape[0], self._zeros.shape[1], dtype=torch.uint8)
        order = _AWQ_ORDER if self._config.layout == "awq" else range(per_word)
        for place, field in enumerate(order):
            values = self._zeros >> (bits * field) & largest
            if self._config.zeros_less_one:
                values = values + 1 & largest
            zeros[place::per_word] = values.to(torch.uint8)
        return zeros


class _Fp4Codes(_PartCodes):
    """4-bit float codes, two per byte."""

    code: WeightCode = "e2m1"

    def __init__(
        self,
        part: WeightPart,
        codes: torch.Tensor,
        columns: int,
        config: Fp4Config,
        options: LayerOptions,
    ) -> None:
        super().__init__(part, codes, columns, (1, config.group_size), options)
        self._layout = config.layout
        self._check_words(1, 2)
        self._global = self._empty(1)
        """Scale of the whole weight (NVFP4)."""

    def slots(self, name: str) -> Iterator[WeightSlot]:
        is_modelopt, is_mxfp4 = self._layout == "modelopt", self._layout == "mxfp4"
        weight = f"{name}.weight" if is_modelopt else f"{name}.weight_packed"
        yield self._slot(weight, self._codes, (1, 2), source_types=("U8",))
        yield self._slot(
            f"{name}.weight_scale",
            self._scales,
            (1, self.block[1]),
            source_types=("U8",) if is_mxfp4 else ("F8_E4M3",),
            fill_dummy=_constant(120.0 if is_mxfp4 else 1.0),
        )
        if not is_mxfp4:
            spread = _SPREAD / _E2M1_SPREAD
            yield WeightSlot(
                name=f"{name}.weight_scale_2" if is_modelopt else f"{name}.weight_global_scale",
                destination=self._global,
                full_shape=(1,),
                stacked=self._part.stacked,
                may_lack_ones=True,
                fill_dummy=_constant(spread if is_modelopt else 1.0 / spread),
            )

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        match self._layout:
            case "modelopt":
                return self._scales * self._global, None
            case "nvfp4":
                return self._scales / self._global, None
        return torch.exp2(self._scales - _EXPONENT_BIAS), None


def _constant(value: float) -> Callable[[torch.Tensor], object]:
    """A function that fills a tensor with a value."""
    return lambda tensor: tensor.fill_(value)


_PARTS: Mapping[type, Callable[..., _PartCodes]] = {
    ScaledConfig: _ScaledCodes,
    GroupedIntConfig: _IntCodes,
    Fp4Config: _Fp4Codes,
}
"""Code classes by class of the format's configuration."""
_INT_CODES: Mapping[tuple[int, bool], WeightCode] = {
    (4, False): "uint4b8",
    (4, True): "uint4",
    (8, False): "uint8b128",
    (8, True): "uint8",
}
"""Kinds of codes by number of bits and whether there are zero points."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index of the 4-bit field that holds each of 8 consecutive output features in a word of AWQ's
layout."""
_EXPONENT_BIAS = 127.0
"""Exponent bias of stored power-of-two scales (E8M0)."""
_SPREAD = 0.02
"""Standard deviation of dummy weights after dequantization."""
_INT_SPREADS = {4: 4.6, 8: 73.9}
_INT8_SPREAD, _E2M1_SPREAD = 73.9, 2.9
"""Standard deviations of random codes before they are scaled."""
