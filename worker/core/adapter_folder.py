"""Checks folders of LoRA adapters before serving, and computes their versions. Does not import
torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from worker.models.config.adapter_version import adapter_version
from worker.models.config.peft import check_header, read_peft_config
from worker.protocol.adapters import AdapterCheck, AdapterRef


def check_adapter(folder: str, max_rank: int) -> AdapterCheck:
    """Checks an adapter's configuration and the header of its weights, and computes its version,
    which takes about a second per GB of weights the first time.

    Errors are not raised but returned as `AdapterCheck.problem`.

    Args:
        folder: the adapter's folder on this node.
        max_rank: maximum rank (`--max-lora-rank`).
    """
    try:
        read_peft_config(Path(folder), max_rank)
        check_header(Path(folder))  # before the digest, which reads the whole file
        return AdapterCheck(version=adapter_version(Path(folder)))
    except (OSError, ValueError) as error:
        return AdapterCheck(problem=str(error))


def static_adapters(folders: Mapping[str, str], max_rank: int) -> list[AdapterRef]:
    """The adapters of `--lora-modules`.

    Args:
        folders: adapter folders on this node, by adapter name.
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
