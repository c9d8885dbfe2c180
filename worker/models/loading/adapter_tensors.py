"""Tensors of a LoRA adapter's file, by the modules that they adapt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from worker.models.config.peft import WEIGHTS_NAME, PeftConfig
from worker.models.layers.linear_method import VALUE_TYPES

_PREFIX = "base_model.model."
"""Prefix of the names of all tensors."""


class Factors(NamedTuple):
    """Name suffixes of the two tensors (A and B) of an adapted module."""

    a: str
    b: str


LINEAR = Factors(".lora_A.weight", ".lora_B.weight")
"""Name suffixes of A [r, in] and B [out, r] of a linear layer."""
EMBEDDING = Factors(".lora_embedding_A", ".lora_embedding_B")
"""Name suffixes of A [r, tokens] and B [hidden, r] of an embedding."""
_BASE = ".base_layer.weight"
"""Suffix of the base weight of an adapted embedding or LM head, which PEFT also saves."""
_ENDS = (*LINEAR, *EMBEDDING)


class AdapterTensors:
    """Tensors of an adapter's file.

    Args:
        file: the open file.
        config: the adapter's configuration.

    Raises:
        ValueError: a tensor does not belong to LoRA, or one of a pair is missing.
    """

    def __init__(self, file: Any, config: PeftConfig) -> None:
        self._file = file
        self.config = config
        self.modules: dict[str, Factors] = {}
        """Name suffixes of the tensors of each adapted module, by its name in the model's
        checkpoint."""
        self.base_modules: list[str] = []
        """Modules whose base weight is also in the file."""
        halves: dict[str, set[str]] = {}
        for name in file.keys():  # noqa: SIM118  # a file is no mapping
            module = name.removeprefix(_PREFIX)
            end = next((end for end in _ENDS if module.endswith(end)), None)
            if module != name and module.endswith(_BASE):
                self.base_modules.append(module.removesuffix(_BASE))
            elif end is None or module == name:
                raise ValueError(_unsupported(name))
            else:
                halves.setdefault(module.removesuffix(end), set()).add(end)
        for module, ends in halves.items():
            factors = next((pair for pair in (LINEAR, EMBEDDING) if ends == set(pair)), None)
            if factors is None:
                raise ValueError(
                    f"{module:.200} in {WEIGHTS_NAME} is missing lora_A or lora_B: use a complete "
                    "adapter"
                )
            self.modules[module] = factors

    def slice(self, name: str, shape: tuple[int, int]) -> Any:
        """A tensor of which slices can be read.

        Raises:
            ValueError: it has the wrong shape or an unsupported type.
        """
        found = self._file.get_slice(_PREFIX + name)
        if tuple(found.get_shape()) != shape:
            raise ValueError(
                f"{name:.200} has shape {list(found.get_shape())}, but {list(shape)} is required: "
                "the adapter is for another model, or its files disagree; use an adapter for this "
                "model"
            )
        if found.get_dtype() not in VALUE_TYPES:
            raise ValueError(
                f"{name:.200} has type {found.get_dtype()}, but only {', '.join(VALUE_TYPES)} are "
                "supported: save the adapter in one of these types"
            )
        return found

    def check_base(self, modules: Collection[str], shape: tuple[int, int]) -> None:
        """Checks the base weights in the file, which are not read.

        Args:
            modules: modules whose weights may be in the file.
            shape: shape of these weights.

        Raises:
            ValueError: a weight has the wrong shape, for example because the vocabulary was
                extended, or belongs to another module.
        """
        for module in self.base_modules:
            if module not in modules:
                raise ValueError(_unsupported(f"{_PREFIX}{module}{_BASE}"))
            found = self._file.get_slice(f"{_PREFIX}{module}{_BASE}").get_shape()
            if tuple(found) != shape:
                raise ValueError(
                    f"{module} in {WEIGHTS_NAME} has shape {list(found)}, but the model's "
                    f"{module} has {list(shape)}: adapters with a different vocabulary size "
                    "are not supported; merge the adapter into the model"
                )


def shown(names: Collection[str], limit: int = 4) -> str:
    """The first names, formatted for an error message."""
    some = [f"{name:.200}" for name in list(names)[:limit]]
    return ", ".join(some) + " ..." * (len(names) > limit)


def _unsupported(name: str) -> str:
    return (
        f"tensor {name:.200} in {WEIGHTS_NAME} is not supported: only LoRA weights of linear "
        "layers and embeddings are supported, not DoRA, modules_to_save or added tokens; train "
        "without these, or merge the adapter into the model"
    )
