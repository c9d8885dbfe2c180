"""Versions of LoRA adapters: digests of their files. Does not import torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from worker.models.config.digests import digests
from worker.models.config.peft import CONFIG_NAME, WEIGHTS_NAME


def adapter_version(folder: Path) -> str:
    """The version of an adapter: 32 hexadecimal digits that depend only on the content of its
    files. Takes about a second per GB of weights, unless they are unchanged since the last call.

    Raises:
        ValueError: the weights are missing.
        OSError: a file cannot be read.
    """
    if not (folder / WEIGHTS_NAME).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS_NAME}: use a folder saved by PEFT")
    found = digests([folder / name for name in (CONFIG_NAME, WEIGHTS_NAME)])
    return hashlib.sha256("".join(found).encode()).hexdigest()[:32]
