"""Files of a checkpoint, in a local folder or in a repository of the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.models.config.digests import digests
from worker.models.config.schema import short
from worker.protocol.hub import download, local_folder
from worker.protocol.retry import Unavailable, may_heal

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_HUB_FILES_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_HUB_FILES = ["*.safetensors", *_HUB_FILES_WITHOUT_WEIGHTS]
_MAX_HEADER_BYTES = 100_000_000
# Copies of the weights in other layouts, which some repositories have, and other files in folders.
# A config.json in a folder is kept: it may configure pooling (sentence-transformers).
_HUB_IGNORED = ["consolidated*", "*/*/*", "*/[!c]*", "*/*.safetensors"]
_REJECTED_FILES = {
    "adapter_config.json": (
        "it is a LoRA adapter: serve its base model with --enable-lora --lora-modules NAME=FOLDER, "
        "or remove the file if the adapter has been merged"
    ),
}
"""Files next to config.json that show that a checkpoint contains no model, with the remedy for
each."""
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files next to config.json that have the quantization format if config.json does not, and the
method of each."""


def resolve_checkpoint(model: str, *, weights: bool = True) -> Path:
    """The folder of a checkpoint; a Hub repository is downloaded into the Hub's cache first.

    Args:
        model: folder or repository id.
        weights: whether the weights are downloaded too.

    Raises:
        Unavailable: there is no such folder, it is empty or lacks files, or the Hub is unreachable.
        ValueError: the Hub denies access, the repository has no complete weights in safetensors, or
            the checkpoint is an adapter or in Mistral's own format.
    """
    folder = local_folder(model)
    if folder is None:
        folder = download(
            model, _HUB_FILES if weights else _HUB_FILES_WITHOUT_WEIGHTS, _HUB_IGNORED
        )
        if not (folder / "config.json").is_file():
            check_format(folder)
        if weights and (problem := _lacking_weights(folder)):
            raise ValueError(f"{model} on the Hugging Face Hub: {problem}")
        return folder
    if not (folder / "config.json").is_file():
        check_format(folder)
        raise Unavailable(
            f"{folder} has no config.json: specify the folder of a Hugging Face checkpoint"
        )
    if weights and (problem := _lacking_weights(folder)):
        raise Unavailable(problem)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """All safetensors files of a checkpoint, in a fixed order.

    Raises:
        Unavailable: there are none, or a file listed in the index is missing.
        ValueError: the index is malformed, or lists anything but safetensors files in the same
            folder.
    """
    if problem := _lacking_weights(folder):
        raise Unavailable(problem)
    return _weight_files(folder)


def indexed_tensors(folder: Path) -> list[str]:
    """Names of all tensors in a checkpoint's index, which is downloaded before the weights; empty
    if there is no index."""
    index = folder / _INDEX
    return list(_weight_map(index)) if index.is_file() else []


def find_shape(folder: Path, end: str) -> list[int] | None:
    """Shape of the first tensor whose name ends with `end`, from the headers of the weight files;
    None if there is none, or if the checkpoint has no weights yet."""
    for path in _weight_files(folder):
        for kind in _kinds(path):
            name, _, shape = kind.partition(" ")
            if name.endswith(end):
                return [int(size) for size in json.loads(shape.partition(" ")[2])]
    return None


def check_files(folder: Path) -> None:
    """Checks that no file of a checkpoint contradicts config.json.

    Raises:
        ValueError: a file contradicts it; the message has the remedy.
    """
    for name, reason in _REJECTED_FILES.items():
        if (folder / name).is_file():
            raise ValueError(f"{folder} contains {name}: {reason}")


def check_format(folder: Path) -> None:
    """Checks that a folder without config.json holds neither an adapter nor a model in Mistral's
    own format, as Mistral Large 3 is released.

    Raises:
        ValueError: it holds an adapter or such a model; the message has the remedy.
    """
    check_files(folder)
    if (folder / "params.json").is_file():
        raise ValueError(
            f"{folder} has params.json but no config.json: Mistral's own format is not "
            "supported; use a checkpoint in the format of transformers (config.json, "
            "tokenizer.json and model*.safetensors). Most of Mistral's repositories have both "
            "formats; for Mistral Large 3, use a checkpoint converted to Mistral4ForCausalLM"
        )


def block_hash_salt(folder: Path, *, weights: bool = True) -> str:
    """A digest of the checkpoint's configuration and all bytes of its weights, so that no two
    fine-tunes share block hashes. It is the same on all machines.

    Without `weights`, it is the digest of a model with dummy weights.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in QUANTIZATION_FILES:
        if (path := folder / name).is_file():
            digest.update(name.encode() + path.read_bytes())
    if not weights:
        digest.update(b"without weights")
        return digest.hexdigest()[:16]
    files = weight_files(folder)
    for path, content in zip(files, digests(files), strict=True):
        digest.update(f"{path.name}:{content};".encode())
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        Unavailable: the file cannot be read.
        ValueError: it does not contain a JSON object; the message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        kind = Unavailable if may_heal(error) else ValueError
        if isinstance(error, OSError):
            raise kind(f"cannot read {path}: {error.strerror}") from error
        raise kind(f"{path} is not valid JSON ({error}): fix it or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object: fix it or download it again")
    return content


def positive_integer(raw: Mapping[str, Any], key: str, within: str = "") -> int:
    """The value of a key that has to be a positive integer.

    Args:
        raw: config.json, or an object in it.
        within: path of that object, for messages, such as "rope_scaling.".

    Raises:
        ValueError: the value is anything else; the message names the key.
    """
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{within}{key} in config.json must be a positive integer, got {short(value)}: fix it"
        )
    return value


def _kinds(path: Path) -> list[str]:
    """Name, dtype and shape of each tensor in a safetensors file, one string per tensor. If the
    header is malformed, which the loader reports, just the file's name."""
    file_size = path.stat().st_size
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        header = file.read(data - 8) if data <= min(file_size, _MAX_HEADER_BYTES) else b""
    try:
        return [
            f"{name} {tensor['dtype']} {tensor['shape']}"
            for name, tensor in json.loads(header).items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [path.name]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return [folder / name for name in _indexed_names(index)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    return sorted(p for p in folder.glob("*.safetensors") if "consolidated" not in p.name)


def _indexed_names(index: Path) -> list[str]:
    """Names of the weight files in an index, which must be files in the same folder.

    HAZARD: a checkpoint is untrusted input; it must not cause other files of this machine to be
    read.
    """
    return sorted(set(_weight_map(index).values()))


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor in an index, validated."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map: download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise ValueError(
                f"{index} names the weight file {name!r:.200}, but weights must be *.safetensors "
                "files next to it: the checkpoint is corrupt or malicious; use another checkpoint"
            )
    return weight_map


def _lacking_weights(folder: Path) -> str:
    """Error message about missing weight files, with the remedy; empty if none is missing."""
    files = _weight_files(folder)
    if not files:
        return (
            f"{folder} has no *.safetensors file: save the checkpoint again with transformers' "
            "save_pretrained, which writes safetensors"
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        return f"{folder} is missing the weight files {', '.join(missing)}: download it again"
    return ""
