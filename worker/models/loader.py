"""Fills a model from safetensors: each rank reads only its own slice of each tensor."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from rich.progress import DownloadColumn, TransferSpeedColumn
from safetensors import safe_open

from worker.models.checkpoint import weight_files
from worker.models.config import ModelConfig
from worker.models.decoder import DecoderModel
from worker.models.linear import WeightSlot
from worker.models.native import NativeOptions, pack_weights
from worker.progress import Advance, progress

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 8


class SafetensorsSlice(Protocol):
    """A tensor in a file, read when it is indexed."""

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        ...

    def __getitem__(self, index: object) -> torch.Tensor: ...


def load_weights(
    model: DecoderModel,
    config: ModelConfig,
    *,
    show_progress: bool,
    native: NativeOptions | None = None,
) -> None:
    """Reads every slot of the model from the checkpoint, then packs the weights.

    Args:
        model: whose slots are filled.
        config: its configuration.
        show_progress: whether to draw a bar.
        native: hands the weights to the compiled CPU library; None packs them for torch.

    At no time is more in memory than the model itself and one more tensor.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; the message names them.
    """
    slots: dict[str, list[WeightSlot]] = {}
    for slot in model.weight_slots():
        slots.setdefault(slot.name, []).append(slot)
    pending = dict(slots)
    unexpected: list[str] = []
    start = time.perf_counter()
    num_bytes = sum(_num_bytes(slot) for parts in slots.values() for slot in parts)
    with torch.inference_mode(), _progress(num_bytes, show_progress) as advance:
        for path in weight_files(config.folder):
            with safe_open(path, framework="pt", device="cpu") as file:
                # offset_keys is the order in the file, so reading is sequential.
                for name in file.offset_keys():
                    parts = pending.pop(name, None)
                    if parts is None:
                        if name not in slots and not _is_ignored(name, config):
                            unexpected.append(name)
                        continue
                    for slot in parts:
                        copy_slice(file.get_slice(name), slot, path)
                        advance(_num_bytes(slot))
        _check_complete(config.folder, sorted(pending), sorted(unexpected))
        pack_weights(model, native)
    logger.info("loaded %.1f MB of weights in %.1f s", num_bytes / 1e6, time.perf_counter() - start)


def copy_slice(source: SafetensorsSlice, slot: WeightSlot, path: Path) -> None:
    """Reads the slot's part of one tensor and converts it to the model's type."""
    shape = tuple(source.get_shape())
    if shape != slot.full_shape:
        raise ValueError(
            f"{slot.name} in {path.name} has shape {list(shape)}, but config.json asks for "
            f"{list(slot.full_shape)}: the checkpoint's files do not belong together"
        )
    length = slot.destination.shape[slot.dim]
    if length == 0:
        return
    index = [slice(None)] * len(shape)
    index[slot.dim] = slice(slot.start, slot.start + length)
    slot.destination.copy_(source[tuple(index)])


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that follow from the configuration, or that tying replaces."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_word_embeddings
    )


def _check_complete(folder: Path, missing: list[str], unexpected: list[str]) -> None:
    problems = []
    if missing:
        problems.append(f"lacks {_shorten(missing)}")
    if unexpected:
        problems.append(f"holds {_shorten(unexpected)}, which this architecture does not use")
    if problems:
        raise ValueError(f"the checkpoint {folder} {' and '.join(problems)}: download it again")


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _num_bytes(slot: WeightSlot) -> int:
    return slot.destination.numel() * slot.destination.element_size()


def _progress(num_bytes: int, show: bool) -> AbstractContextManager[Advance]:
    return progress(
        "loading weights",
        num_bytes,
        amount=f"{num_bytes / 1e6:.1f} MB",
        columns=(DownloadColumn(), TransferSpeedColumn()),
        show=show,
    )
