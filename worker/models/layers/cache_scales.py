"""Scales of FP8 KV caches, which a checkpoint may have for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from worker.models.layers.linear_method import LayerOptions, WeightSlot


class CacheScales:
    """Scales of one layer's FP8 KV cache: keys and values are the cached numbers times a scale.

    Without an FP8 cache, the scales are 1 and nothing is loaded.

    Args:
        options: options of the model's layers.
        keys: possible names of the keys' scale in a checkpoint, within the attention block. The
            scale is 1 if the checkpoint has none of them.
        values: possible names of the values' scale.
    """

    def __init__(
        self, options: LayerOptions, *, keys: Sequence[str], values: Sequence[str]
    ) -> None:
        self.key = 1.0
        """Scale of keys, or of latents."""
        self.value = 1.0
        """Scale of values."""
        self._names = [] if options.cache_dtype is None else [tuple(keys), tuple(values)]
        self._loaded = [torch.full((len(names),), math.nan) for names in self._names]
        self._prefix = ""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots for the scales under all names; `prefix` ends with a dot."""
        self._prefix = prefix
        for names, loaded in zip(self._names, self._loaded, strict=True):
            for index, name in enumerate(names):
                yield WeightSlot(
                    name=f"{prefix}{name}",
                    destination=loaded[index : index + 1],
                    full_shape=(1,),
                    may_lack_ones=True,
                    is_optional=True,
                )

    def process_after_loading(self) -> None:
        """Reads the loaded scales.

        Raises:
            ValueError: a scale is not a positive number.
        """
        if self._loaded:
            self.key, self.value = (
                self._found(*pair) for pair in zip(self._names, self._loaded, strict=True)
            )

    def _found(self, names: Sequence[str], loaded: torch.Tensor) -> float:
        for name, scale in zip(names, loaded.tolist(), strict=True):
            if math.isnan(scale):
                continue
            if not 0.0 < scale < math.inf:
                raise ValueError(
                    f"{self._prefix}{name} is {scale:g}, but scales of an FP8 KV cache must be "
                    "greater than 0: use --kv-cache-dtype auto, or another checkpoint"
                )
            return float(scale)
        return 1.0
