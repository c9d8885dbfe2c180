"""Where a checkpoint's files are: a local folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HUB_FILES_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_HUB_FILES = ["*.safetensors", *_HUB_FILES_WITHOUT_WEIGHTS]
# Second copies of the weights in other layouts that some repositories carry.
_HUB_IGNORED = ["consolidated*", "*/*"]


def resolve_checkpoint(model: str, *, weights: bool = True) -> Path:
    """The folder of a checkpoint; a Hub repository is downloaded into the Hub's cache first.

    Args:
        model: the folder or the repository's name.
        weights: whether the weights are downloaded too.

    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as everywhere.

    Raises:
        ValueError: no such folder, and the Hub does not have it or cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} holds no config.json: give the folder of a Hugging Face checkpoint"
            )
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"the model folder {model} does not exist")
    return _download(model, _HUB_FILES if weights else _HUB_FILES_WITHOUT_WEIGHTS)


def weight_files(folder: Path) -> list[Path]:
    """All safetensors files of a checkpoint, in a fixed order.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
        files = [folder / name for name in names]
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        files = sorted(p for p in folder.glob("*.safetensors") if "consolidated" not in p.name)
    if not files:
        raise ValueError(
            f"{folder} holds no *.safetensors file: save the checkpoint again with transformers' "
            "save_pretrained, which writes safetensors"
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks the weight files {', '.join(missing)}: download it again")
    return files


def block_hash_salt(folder: Path, *, weights: bool = True) -> str:
    """A short name for this very checkpoint: its configuration and its weight files' sizes.

    Without `weights` the name is that of a model which never reads them.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if not weights:
        digest.update(b"without weights")
    for path in weight_files(folder) if weights else ():
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError with the file's name where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _download(repository: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repository, allow_patterns=files, ignore_patterns=_HUB_IGNORED)
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{repository} is neither a folder here nor in the Hub's cache, and the Hub cannot be "
            "reached (is HF_HUB_OFFLINE set?): download it first or give a folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{repository} is no folder here and the Hub does not give it: {error}"
        ) from error
