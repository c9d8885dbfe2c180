"""GPTQ weights with activation order (desc_act), in which an index maps input features to
groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from worker.models.config.quantization import GroupedIntConfig
from worker.models.layers.linear_method import LayerOptions, WeightPart, WeightSlot, check_words


class IndexedCodes:
    """One weight of a checkpoint on one rank, dequantized when packed.

    A rank's input features may be in any group, so each rank holds the scales of all groups.
    Kernels for codes need groups of consecutive features. Reordering the features would provide
    such groups, but each part of a fused weight would need a different order.

    Args:
        part: part of a fused weight that corresponds to the checkpoint's tensor.
        columns: number of input features on this rank.
        config: parameters of the format.
        options: options of the model's layers.
        fill_scales: fills the scales of dummy weights.

    Raises:
        ValueError: the weight would be split within a word of codes.
    """

    def __init__(
        self,
        part: WeightPart,
        columns: int,
        config: GroupedIntConfig,
        options: LayerOptions,
        fill_scales: Callable[[torch.Tensor], object],
    ) -> None:
        self._part, self._config, self._options = part, config, options
        self._fill_scales = fill_scales
        self._name = part.name
        rows, self._per_word = part.rows.stop - part.rows.start, 32 // config.bits
        self._first = [0, 0]
        self._first[part.dim] = part.start
        for dim, count in enumerate((rows, columns)):
            full = part.full_shape[dim]
            check_words(part.name, self._first[dim], count, full, self._per_word, options)
        self._group = config.group_size or part.full_shape[1]
        groups = -(-part.full_shape[1] // self._group)
        self._words = self._empty(columns // self._per_word, rows, dtype=torch.int32)
        self._zeros = self._empty(groups, rows // self._per_word, dtype=torch.int32)
        self._scales = self._empty(groups, rows)
        self._index = self._empty(columns, dtype=torch.int32)
        """Group of each input feature."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots for the tensors that the checkpoint must contain; `prefix` precedes the
        part's name."""
        self._name = name = prefix + self._part.name
        rows, columns = self._part.full_shape
        first_row, first_column = self._first
        groups, per_word = len(self._scales), self._per_word
        shared = 1 - self._part.dim  # input features come first
        start = self._part.start if shared else first_column // per_word
        middle = {4: -0x77777778, 8: -0x7F7F7F80}[self._config.bits]
        yield WeightSlot(
            name=f"{name}.qweight",
            destination=self._words,
            full_shape=(columns // per_word, rows),
            dim=shared,
            start=start,
            source_types=("I32",),
        )
        yield WeightSlot(
            name=f"{name}.scales",
            destination=self._scales,
            full_shape=(groups, rows),
            dim=1,
            start=first_row,
            fill_dummy=self._fill_scales,
        )
        yield WeightSlot(
            name=f"{name}.qzeros",
            destination=self._zeros,
            full_shape=(groups, rows // per_word),
            dim=1,
            start=first_row // per_word,
            source_types=("I32",),
            fill_dummy=lambda zeros: zeros.fill_(middle),
        )
        yield WeightSlot(
            name=f"{name}.g_idx",
            destination=self._index,
            full_shape=(columns,),
            start=first_column,
            source_types=("I32",),
            fill_dummy=lambda index: index.random_(groups),
        )

    def dense(self) -> torch.Tensor:
        """The loaded weight [out, in] in the model's data type.

        Raises:
            ValueError: the index contains a group that does not exist.
        """
        index = self._index.long()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(self._scales):
            raise ValueError(
                f"g_idx of {self._name} has groups beyond the {len(self._scales)} that have "
                "scales: the checkpoint is corrupt; download it again"
            )
        zeros = self._unpacked(self._zeros.T).T
        if self._config.zeros_less_one:
            zeros = zeros + 1 & 2**self._config.bits - 1
        values = (self._unpacked(self._words) - zeros[index]) * self._scales[index]
        return values.T.to(self._options.dtype)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """Unpacks int32 words [words, N] to codes [words * codes per word, N]."""
        bits = self._config.bits
        shifts = bits * torch.arange(self._per_word, dtype=torch.int32, device=words.device)
        fields: torch.Tensor = words[:, None] >> shifts[:, None] & 2**bits - 1
        return fields.flatten(0, 1)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._options.device)
