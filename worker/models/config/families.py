"""Supported model families, collected from the modules in `vendors/`. Does not import torch."""

from __future__ import annotations

import importlib
import pkgutil

from worker.models.config import vendors
from worker.models.config.family import FamilyConfig
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import RawConfig, architectures

_VENDORS = tuple(
    importlib.import_module(f"{vendors.__name__}.{page.name}")
    for page in pkgutil.iter_modules(vendors.__path__)
)
_UNSORTED = {family.architecture: family for vendor in _VENDORS for family in vendor.FAMILIES}
FAMILIES: dict[str, type[FamilyConfig]] = {
    name: _UNSORTED[name] for name in sorted(_UNSORTED, key=str.lower)
}
"""Families by value of `architectures` in config.json, in alphabetical order."""
_BY_ALL_NAMES = FAMILIES | {
    name: family for family in FAMILIES.values() for name in family.other_architectures
}

MULTIMODAL: dict[str, MultimodalConfig] = {
    name: config
    for vendor in _VENDORS
    for config in getattr(vendor, "MULTIMODAL", ())
    for name in config.architectures
}
"""Multimodal checkpoints, whose text model is served, by value of `architectures`."""


def read_family(raw: RawConfig) -> tuple[FamilyConfig, TensorNames | None]:
    """Reads config.json, or its text model's part, using the family's schema.

    Returns:
        The family's configuration, and the text model's tensor names in the checkpoint (None if it
        is not multimodal).

    Raises:
        ValueError: config.json has no supported architecture, or has an unsupported key; the
            message names it.
    """
    names, tensors = architectures(raw), None
    if multimodal := next((MULTIMODAL[name] for name in names if name in MULTIMODAL), None):
        raw, tensors = multimodal.text_config(raw), multimodal.tensors
        names = architectures(raw)
    for name in names:
        if name in _BY_ALL_NAMES:
            return _BY_ALL_NAMES[name].read(raw), tensors
    raise ValueError(
        f"architectures {names} in config.json are not supported: use a checkpoint of one of "
        f"{', '.join(FAMILIES)}"
    )
