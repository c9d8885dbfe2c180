"""Record of the tests that each model family and quantization format passes. Does not import torch.

The record, tested_families.json, is generated from the tests; see worker/models/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.models.config.families import FAMILIES, MULTIMODAL

RECORD = Path(__file__).with_name("tested_families.json")
CHECKS: Mapping[str, str] = {
    "alone": "one request at a time",
    "batched": "concurrent requests",
    "prefix hit": "prompts with cached prefixes",
    "chunks": "prompts in chunks of 32 tokens",
    "scarce": "preemption because the KV cache is too small for all requests",
    "TP 2": "two ranks",
    "EP 2": "two ranks, each of which holds half of the experts",
    "mutations": "each feature of the family, broken on purpose, changes the logits",
    "drafts": "speculative decoding",
    "grammar": "structured outputs",
    "blocks": "block diffusion",
    "native": "steps run by the compiled CPU library",
    "triton": "CUDA kernels, in Triton's interpreter",
    "cuda": "captured steps on a simulated CUDA device",
}
"""Descriptions of a family's checks, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestedFamily:
    """A supported model family, with the checks that it passes."""

    architecture: str
    """Value of `architectures` in config.json."""
    model_types: tuple[str, ...]
    text_of: tuple[str, ...]
    """Families of a multimodal checkpoint's text model; empty for other checkpoints."""
    checks: Mapping[str, tuple[str, ...]]
    """References with which the results were compared, by name of the check in `CHECKS`."""
    released: tuple[str, ...]
    """Released models whose config.json is known to be accepted."""

    def fits(self, word: str) -> bool:
        """Whether a lower-case word is part of a name of the family or of its models."""
        names = (self.architecture, *self.model_types, *self.text_of, *self.released)
        return any(word in name.lower() for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class TestedFormat:
    """A supported format of quantized weights."""

    name: str
    families: tuple[str, ...]
    """Families of the checkpoints with which it was checked; it works for linear layers of all
    families."""
    against: tuple[str, ...]
    """References with which the results were compared."""


def tested_families() -> list[TestedFamily]:
    """All supported families, in the order of `FAMILIES`, then multimodal ones."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    kinds: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    kinds = {name: (family.model_types, ()) for name, family in FAMILIES.items()}
    kinds |= {
        name: ((config.model_type,), tuple(dict.fromkeys(config.texts.values())))
        for name, config in MULTIMODAL.items()
    }
    return [
        TestedFamily(
            architecture=name,
            model_types=model_types,
            text_of=texts,
            checks={
                check: tuple(record["checks"][name][check])
                for check in CHECKS
                if check in record["checks"].get(name, ())
            },
            released=tuple(record["released"].get(name, ())),
        )
        for name, (model_types, texts) in kinds.items()
    ]


def tested_formats() -> list[TestedFormat]:
    """All quantization formats that are tested."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return [
        TestedFormat(name=name, families=tuple(row["of"]), against=tuple(row["against"]))
        for name, row in record["formats"].items()
    ]
