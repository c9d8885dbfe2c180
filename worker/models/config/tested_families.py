"""Record of the tests that each model family and quantization format goes through. Imports no
torch.

The record, tested_families.json, is generated from the tests; worker/models/README.md says how.
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
    "batched": "requests beside each other",
    "prefix hit": "prompts whose beginnings are cached",
    "chunks": "prompts in chunks of 32 tokens",
    "scarce": "KV cache too small for all, with preemptions",
    "TP 2": "two ranks",
    "EP 2": "two ranks, each of which holds half of the experts",
    "mutations": "each feature of the family, broken on purpose, shows in the logits",
    "drafts": "speculative decoding",
    "grammar": "constrained output",
    "blocks": "block diffusion",
    "native": "steps by the compiled CPU library",
    "triton": "kernels for CUDA, in Triton's interpreter",
    "cuda": "captured steps on a stand-in for a CUDA device",
}
"""Checks of a family, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFamily:
    """A served model family, with the checks that it went through."""

    architecture: str
    """Value of `architectures` in config.json."""
    model_types: tuple[str, ...]
    text_of: tuple[str, ...]
    """Families of its text model, for checkpoints with more than a language model; else empty."""
    checks: Mapping[str, tuple[str, ...]]
    """References that the results were compared with, by name of the check in `CHECKS`."""
    released: tuple[str, ...]
    """Released models whose config.json is known to be accepted."""

    def fits(self, word: str) -> bool:
        """Whether a lower-case word is part of a name of the family or of its models."""
        names = (self.architecture, *self.model_types, *self.text_of, *self.released)
        return any(word in name.lower() for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFormat:
    """A format of quantized weights that is read."""

    name: str
    families: tuple[str, ...]
    """Families of the checkpoints that it was checked with; it works in linear layers of all
    families."""
    against: tuple[str, ...]
    """References that the results were compared with."""


def checked_families() -> list[CheckedFamily]:
    """All served families, in the order of `FAMILIES`, then those of which only the text is
    served."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    kinds: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    kinds = {name: (family.model_types, ()) for name, family in FAMILIES.items()}
    kinds |= {
        name: ((config.model_type,), tuple(dict.fromkeys(config.texts.values())))
        for name, config in MULTIMODAL.items()
    }
    return [
        CheckedFamily(
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


def checked_formats() -> list[CheckedFormat]:
    """All quantization formats that tests go through."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return [
        CheckedFormat(name=name, families=tuple(one["of"]), against=tuple(one["against"]))
        for name, one in record["formats"].items()
    ]
