"""Folders of LoRA adapters: checks before they are served, and versions. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from worker.models.config.digests import digests
from worker.models.config.peft import CONFIG_NAME, WEIGHTS_NAME, read_peft_config
from worker.protocol.adapters import AdapterCheck, AdapterRef


def check_adapter(folder: str, max_rank: int) -> AdapterCheck:
    """Checks an adapter's configuration and computes its version, which takes about a second per
    GB of weights at the first time.

    Args:
        folder: folder on this node.
        max_rank: maximum rank (`--max-lora-rank`).
    """
    try:
        return AdapterCheck(version=_version(Path(folder), max_rank))
    except (OSError, ValueError) as error:
        return AdapterCheck(problem=str(error))


def static_adapters(folders: Mapping[str, str], max_rank: int) -> list[AdapterRef]:
    """The adapters of `--lora-modules`.

    Args:
        folders: folders on this node, by name.
        max_rank: maximum rank (`--max-lora-rank`).

    Raises:
        ValueError: an adapter is missing or unsupported.
    """
    found = []
    for name, path in folders.items():
        folder = str(Path(path).expanduser())
        check = check_adapter(folder, max_rank)
        if check.problem:
            raise ValueError(f"--lora-modules: {name}: {check.problem}")
        found.append(AdapterRef(name, folder, check.version))
    return found


def _version(folder: Path, max_rank: int) -> str:
    read_peft_config(folder, max_rank)
    if not (folder / WEIGHTS_NAME).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS_NAME}")
    found = digests([folder / name for name in (CONFIG_NAME, WEIGHTS_NAME)])
    return hashlib.sha256("".join(found).encode()).hexdigest()[:32]
