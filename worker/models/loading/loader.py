"""Loader: builds a model and reads each rank's slice of its weights from safetensors files.

Names, shapes and types are checked in the files' headers before any weight is read.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import DownloadColumn, TransferSpeedColumn
from safetensors import safe_open

from worker.memory import release_freed_memory
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.checkpoint import weight_files
from worker.models.config.encoders import ENCODERS
from worker.models.config.families import FAMILIES
from worker.models.config.model_config import ModelConfig
from worker.models.config.quantization_formats import CACHE_SCALE_ENDS
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.quantized_linear import create_linear_method
from worker.models.layers.sharing import check_sharing
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.native import NativeOptions, pack_weights, weight_memory
from worker.models.loading.tensor_reader import Block, TensorFile, read_blocks
from worker.progress import Advance, progress

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 8
_TIED_NAME = "lm_head.weight"
_SEED = 0
_SPREAD = 0.02
"""Standard deviation of dummy weights, a common value for initialization."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """Tensors of a checkpoint that the model needs."""

    by_file: Mapping[Path, Sequence[tuple[str, str]]]
    """Tensors by file, as pairs of the name in the file and the family's name, in file order so
    that reads are sequential."""
    tied_file: Path | None
    """File with an LM head that must equal the embedding, since the two are tied; None if there is
    none."""
    tied_name: str
    """Name of the LM head's weight in that file."""


class Loadable(Protocol):
    """A model, or a head with its own checkpoint."""

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        ...

    def process_after_loading(self) -> None:
        """Converts the loaded weights to the form in which they are used."""
        ...


def build_model(config: ModelConfig, options: LayerOptions, max_model_len: int) -> DecoderModel:
    """Builds a model with uninitialized weights.

    Raises:
        ValueError: the model cannot be divided evenly among the ranks, or expert parallelism is
            enabled for a model without experts.
    """
    check_sharing(config, options.group.world_size, expert_parallel=options.expert_parallel)
    families = ENCODERS if config.is_bidirectional else FAMILIES
    module, name = families[config.architecture].implementation.split(":")
    implementation = getattr(importlib.import_module(f"worker.models.architectures.{module}"), name)
    method = create_linear_method(
        config.quantization, config.tensors, quantizes_fp8=options.quantizes_fp8
    )
    options = replace(options, linear_method=method)
    model = implementation(config, options, max_model_len)
    assert isinstance(model, DecoderModel)
    return model


def build_without_weights(
    config: ModelConfig, world_size: int, *, expert_parallel: bool = False
) -> DecoderModel:
    """Builds a model as a rank does, but on the meta device, which allocates no weights.

    Args:
        config: the model's configuration.
        world_size: number of ranks.
        expert_parallel: whether ranks hold whole experts.

    Raises:
        ValueError: as in `build_model`.
    """
    device = torch.device("meta")
    group = TensorParallelGroup(rank=0, world_size=world_size, device=device, process_group=None)
    options = LayerOptions(
        group=group,
        dtype=torch.bfloat16,  # names and headers are checked in the same way for all types
        device=device,
        batch_invariant=False,
        expert_parallel=expert_parallel,
    )
    # A single block: rotary tables are computed on the CPU for each position.
    return build_model(config, options, max_model_len=config.block_size)


def check_weights(model: Loadable, config: ModelConfig) -> None:
    """Checks a checkpoint as a rank does when loading it, but only reads the headers of weight
    files.

    Raises:
        ValueError: tensors are missing, unexpected, or of the wrong shape or type.
    """
    _check_headers(_slots_by_name(model), config)


def check_names(model: DecoderModel, config: ModelConfig, names: Iterable[str]) -> None:
    """Checks the names of a checkpoint's tensors. Their files need not be downloaded yet.

    Raises:
        ValueError: tensors are missing or unexpected.
    """
    matching = _Matching(_slots_by_name(model), config)
    for name in names:
        matching.needed(name)
    matching.check()


def load_weights(
    model: DecoderModel,
    config: ModelConfig,
    *,
    show_progress: bool,
    native: NativeOptions | None = None,
) -> None:
    """Reads all slots of the model from the checkpoint, then packs the weights. Reads nothing if
    the compiled library has cached the packed weights in a file.

    Peak memory is the model plus a few blocks that are being read.

    Args:
        model: the model to load.
        config: the model's configuration.
        show_progress: whether to show a progress bar.
        native: options for the compiled CPU library; None packs the weights for torch.

    Raises:
        ValueError: tensors are missing, unexpected, or of the wrong shape or type; the message
            names them.
    """
    with torch.inference_mode(), weight_memory(model, native) as memory:
        if not memory.is_filled:
            _read(model, config, show_progress)
        pack_weights(model, native, memory)
    release_freed_memory()


def load_head(
    head: Loadable,
    config: ModelConfig,
    device: torch.device,
    *,
    show_progress: bool,
    is_dummy: bool = False,
) -> None:
    """Reads all slots of a head from its own checkpoint, then packs the weights.

    Args:
        head: the head to load.
        config: the configuration of its checkpoint.
        device: device of its weights.
        show_progress: whether to show a progress bar.
        is_dummy: whether to use dummy weights instead of the checkpoint's.

    Raises:
        ValueError: as in `load_weights`.
    """
    with torch.inference_mode():
        if is_dummy:
            _fill_dummy(head.weight_slots(), device)
        else:
            slots = _slots_by_name(head)
            _read_slots(slots, _check_headers(slots, config), show_progress)
            del slots  # slots reference memory that packing frees
        head.process_after_loading()
    release_freed_memory()


def _read(model: DecoderModel, config: ModelConfig, show_progress: bool) -> None:
    """Fills all slots of a model. No slot may outlive this call: slots reference memory that
    packing frees."""
    slots = _slots_by_name(model)
    contents = _check_headers(slots, config)
    _read_slots(slots, contents, show_progress)
    if contents.tied_file is not None:
        embedding = slots[f"{model.embedding_name}.weight"][0]
        _check_tied(contents.tied_file, contents.tied_name, embedding)


def _read_slots(
    slots: Mapping[str, Sequence[WeightSlot]], contents: _Contents, show_progress: bool
) -> None:
    start = time.perf_counter()
    blocks = list(_blocks(contents, slots))
    num_bytes = sum(block.num_bytes for block in blocks)
    with _progress(num_bytes, show_progress) as advance:
        read_blocks(blocks, advance)
    seconds = time.perf_counter() - start
    amount = f"{num_bytes / 1e6:.1f} MB of weights in {seconds:.1f} s"
    logger.info("loaded %s, %.2f GB/s", amount, num_bytes / 1e9 / seconds)


def _slots_by_name(model: Loadable) -> dict[str, list[WeightSlot]]:
    slots: dict[str, list[WeightSlot]] = {}
    for slot in model.weight_slots():
        slots.setdefault(slot.name, []).append(slot)
    return slots


def fill_dummy_weights(model: DecoderModel, native: NativeOptions | None = None) -> None:
    """Fills all slots with dummy (random) weights on their device, for benchmarks, then packs the
    weights like `load_weights`."""
    with torch.inference_mode():
        _fill_dummy(model.weight_slots(), model.options.device)
        pack_weights(model, native)


def _fill_dummy(slots: Iterable[WeightSlot], device: torch.device) -> None:
    generator = torch.Generator(device=device).manual_seed(_SEED)
    for slot in slots:
        if slot.fill_dummy is not None:
            slot.fill_dummy(slot.destination)
        elif len(slot.full_shape) > 1:
            _fill_random(slot.destination, generator)
        else:  # norms and biases
            slot.destination.fill_(0.0 if slot.name.endswith("bias") else 1.0)


def _fill_random(destination: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a tensor with normally distributed values (for FP8, rounded from bfloat16), or with
    random bits if it has an integer type."""
    if not destination.is_floating_point():
        limits = torch.iinfo(destination.dtype)
        destination.random_(limits.min, limits.max, generator=generator)
        return
    is_fp8 = destination.dtype.itemsize == 1
    drawn = destination.to(torch.bfloat16) if is_fp8 else destination
    destination.copy_(drawn.normal_(0.0, _SPREAD, generator=generator))


def _blocks(contents: _Contents, slots: Mapping[str, Sequence[WeightSlot]]) -> Iterator[Block]:
    """Blocks to read, file by file, in file order."""
    for path, names in contents.by_file.items():
        file = TensorFile(path)
        for name, internal_name in names:
            for slot in slots[internal_name]:
                yield from file.blocks(name, slot)


class _Matching:
    """Comparison of the names of a checkpoint's tensors with the slots."""

    def __init__(self, slots: Mapping[str, Sequence[WeightSlot]], config: ModelConfig) -> None:
        self._slots, self._config = slots, config
        self._missing = dict(slots)
        self._unexpected, self._twice = list[str](), list[str]()
        self._cache_scales = list[str]()
        self.tied_name = ""
        """Name of an LM head that must equal the embedding; empty if there is none."""

    def needed(self, name: str) -> str | None:
        """The family's name of a tensor; None if no slot is read from it."""
        internal_name = (
            name if self._config.tensors is None else self._config.tensors.internal_name(name)
        )
        if internal_name is None:
            return None
        if self._missing.pop(internal_name, None) is not None:
            return internal_name
        if internal_name == _TIED_NAME and self._config.tie_word_embeddings:
            self.tied_name = name
        elif internal_name in self._slots:
            self._twice.append(name)
        elif self._config.quantization is not None and name.endswith(CACHE_SCALE_ENDS):
            self._cache_scales.append(name)
        elif not name.endswith("rotary_emb.inv_freq"):
            self._unexpected.append(name)
        return None

    def check(self) -> None:
        """Raises ValueError, with tensor names, if the tensors differ from the slots."""
        kinds = {
            "missing": sorted(
                name for name, slots in self._missing.items() if not slots[0].is_optional
            ),
            "unexpected": sorted(self._unexpected),
            "duplicate": sorted(self._twice),
        }
        mtp = self._config.mtp
        if mtp is not None and f"{mtp.projection}.weight" in kinds["missing"]:
            raise ValueError(
                f"--speculative-method mtp: checkpoint {self._config.folder} has no MTP head "
                f"({mtp.projection}.weight is missing): use ngram, or draft with a smaller model"
            )
        problems = [f"{kind} {_shorten(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise ValueError(
                f"tensors of checkpoint {self._config.folder} do not match "
                f"{self._config.architecture}: {'; '.join(problems)}. Its config.json and weights "
                "disagree, or files are missing"
            )
        if self._cache_scales and any(slots[0].is_optional for slots in self._slots.values()):
            names = _shorten(sorted(self._cache_scales))
            logger.warning("ignoring KV cache scales with unsupported names: %s", names)


def _check_headers(slots: Mapping[str, Sequence[WeightSlot]], config: ModelConfig) -> _Contents:
    """Compares names, shapes and types of a checkpoint's tensors with the slots.

    Raises:
        ValueError: they differ; the message names the tensors.
    """
    matching, tied_file = _Matching(slots, config), None
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for path in weight_files(config.folder):
        with safe_open(path, framework="pt", device="cpu") as file:
            by_file[path] = []
            for name in file.offset_keys():
                internal_name = matching.needed(name)
                if internal_name is not None:
                    by_file[path].append((name, internal_name))
                    _check_tensor(file.get_slice(name), slots[internal_name][0], path)
                elif name == matching.tied_name:
                    tied_file = path
    matching.check()
    return _Contents(by_file=by_file, tied_file=tied_file, tied_name=matching.tied_name)


def _check_tensor(source: Any, slot: WeightSlot, path: Path) -> None:
    shape = tuple(source.get_shape())
    expected = slot.stored_shape
    is_right = shape == expected
    if slot.may_lack_ones:
        rest = expected[len(shape) :]
        is_right = (*shape, *rest) == expected and set(rest) <= {1}
    if not is_right:
        raise ValueError(
            f"{slot.name} in {path.name} has shape {list(shape)}, but config.json implies "
            f"{list(expected)}: the checkpoint's files disagree; download them again"
        )
    if source.get_dtype() not in slot.source_types:
        raise ValueError(
            f"{slot.name} in {path.name} has type {source.get_dtype()}, but config.json implies "
            f"{' or '.join(slot.source_types)}: use the checkpoint's unquantized version"
        )


def _check_tied(path: Path, name: str, embedding: WeightSlot) -> None:
    """Checks that the LM head of a checkpoint with tied embeddings equals the embedding;
    transformers would use the head.

    Raises:
        ValueError: they differ.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        is_alike = tuple(file.get_slice(name).get_shape()) == embedding.full_shape
    blocks = TensorFile(path).blocks(name, embedding) if is_alike else ()
    if not is_alike or not all(block.equals(block.read_copy()) for block in blocks):
        raise ValueError(
            f"tie_word_embeddings is true in config.json, but {name} in {path.name} differs from "
            "the embedding: set it to false to use that weight"
        )


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _progress(num_bytes: int, show: bool) -> AbstractContextManager[Advance]:
    return progress(
        "loading weights",
        num_bytes,
        amount=f"{num_bytes / 1e6:.1f} MB",
        columns=(DownloadColumn(), TransferSpeedColumn()),
        are_bytes=True,
        show=show,
    )
