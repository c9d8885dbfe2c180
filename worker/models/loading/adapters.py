"""LoRA adapters of a model on one rank: buffers in its layers, and adapters saved by PEFT.

    read (host, any thread) ──> Adapter ──load──> slot on the device

Each rank reads its own slices: a column-parallel layer reads all of A and its rows of B, a
row-parallel layer reads its columns of A and all of B.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kernels.lora import LoraPart, LoraWeights
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.multimodal import TensorNames
from worker.models.config.peft import WEIGHTS_NAME, read_peft_config
from worker.models.layers.linear import Linear
from worker.models.layers.linear_method import WeightPart
from worker.models.layers.lora import LoraFactors, LoraLayer, LoraRows
from worker.models.loading.adapter_tensors import LINEAR, AdapterTensors, shown
from worker.models.loading.vocabulary_adapters import OPTION, VocabularyAdapters

_BYTES_PER_TENSOR = 512
"""Maximum size in bytes of a tensor's entry in a safetensors header; typical entries take 150
bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter's weights on one rank, in host memory."""

    layers: Sequence[LoraFactors | None]
    """Weights by layer that supports adapters; None for layers that the adapter does not change."""
    vocabulary: Sequence[LoraFactors | None] = ()
    """Weights of the embedding and the LM head, as in `layers`; empty if they cannot have
    adapters."""

    @property
    def num_bytes(self) -> int:
        """Size of all weights, in bytes."""
        layers = [*self.layers, *self.vocabulary]
        return sum(layer.num_bytes for layer in layers if layer is not None)


class _Projection(NamedTuple):
    """A projection of the checkpoint in a layer that supports adapters."""

    layer: int
    """Index of the layer among those that support adapters."""
    group: int
    """Index of the projection among those that the layer fuses."""
    parts: tuple[WeightPart, ...]
    """The projection's parts on this rank."""


class ModelAdapters:
    """LoRA adapters of a model on one rank. Adds buffers to the layers: create it before the
    weights are loaded.

    Args:
        max_loras: number of slots on the device.
        max_rank: maximum rank of an adapter.
        is_native: whether the compiled CPU library computes the LoRA matmuls.
        with_vocabulary: whether the embedding and the LM head may also have adapters.

    Raises:
        ValueError: no layer of the model supports adapters, or `with_vocabulary` is set and the
            embedding does not support them.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        max_loras: int,
        max_rank: int,
        is_native: bool = False,
        with_vocabulary: bool = False,
    ) -> None:
        self._max_rank = max_rank
        self._dtype = model.options.dtype
        self._pins = model.options.device.type == "cuda"
        self._names: TensorNames | None = model.config.tensors
        self.rows = LoraRows()
        """Adapters of the current step's tokens."""
        self._linears: list[Linear] = []
        self._layers: list[LoraLayer] = []
        self._projections: dict[str, _Projection] = {}
        for layer, prefix in _linears(model):
            names = list(dict.fromkeys(part.name for part in layer.parts))
            groups = [names.index(part.name) for part in layer.parts]
            layer.lora = LoraLayer(
                LoraWeights.allocate(
                    num_slots=max_loras,
                    in_features=layer.shape[1],
                    parts=_joined(layer.parts, groups),
                    rank=max_rank,
                    dtype=self._dtype,
                    device=model.options.device,
                    batch_invariant=model.options.batch_invariant,
                    is_native=is_native,
                ),
                self.rows,
            )
            for group, name in enumerate(names):
                parts = tuple(part for part in layer.parts if part.name == name)
                projection = _Projection(len(self._layers), group, parts)
                self._projections[f"{prefix}{name}"] = projection
            self._linears.append(layer)
            self._layers.append(layer.lora)
        if not self._layers:
            raise ValueError(
                f"--enable-lora is not supported for {model.config.architecture}: remove it"
            )
        self._vocabulary_names = {model.embedding_name, model.head_name}
        self.vocabulary: VocabularyAdapters | None = None
        """Adapters of the embedding and the LM head; None if they are disabled."""
        if with_vocabulary:
            sizes = {"max_loras": max_loras, "max_rank": max_rank}
            self.vocabulary = VocabularyAdapters(
                model, **sizes, is_native=is_native, rows=self.rows
            )

    @property
    def modules(self) -> Collection[str]:
        """The family's names of the projections that may have adapters."""
        return self._projections.keys()

    @property
    def num_bytes(self) -> int:
        """Size of the buffers on the device, in bytes."""
        num_bytes = sum(layer.num_bytes for layer in self._layers)
        if self.vocabulary is not None:
            num_bytes += sum(layer.num_bytes for layer in self.vocabulary.layers.values())
        return num_bytes

    def load(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter to the 1-based slot `slot`. Does not wait for the device."""
        for layer, factors in zip(self._layers, adapter.layers, strict=True):
            layer.load(slot, factors)
        if self.vocabulary is not None:
            layers = self.vocabulary.layers.values()
            for own, factors in zip(layers, adapter.vocabulary, strict=True):
                own.load(slot, factors)

    def read(self, folder: Path) -> Adapter:
        """Reads this rank's part of an adapter to host memory.

        Raises:
            ValueError: the folder has no adapter for this model, or the adapter is not supported.
            OSError: a file cannot be read.
        """
        config = read_peft_config(folder, self._max_rank)
        path = folder / WEIGHTS_NAME
        self._check_file(path)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                return self._read(AdapterTensors(file, config))
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a safetensors file ({error}): save or download the adapter again"
            ) from error

    def _check_file(self, path: Path) -> None:
        """Checks the size of the header, which safetensors reads as a whole; raises ValueError if
        it is too large, or if the file is missing."""
        if not path.is_file():
            raise ValueError(
                f"{path.parent} has no {WEIGHTS_NAME}: save the adapter with "
                "`safe_serialization=True`"
            )
        with path.open("rb") as file:
            head = file.read(8)
        # Two tensors per module, and the base weights of embedding and LM head.
        most = 2 * len(self._projections) + 3 * len(self._vocabulary_names)
        if len(head) == 8 and struct.unpack("<Q", head)[0] > (most + 1) * _BYTES_PER_TENSOR:
            raise ValueError(
                f"{WEIGHTS_NAME} has more than {most} tensors: the adapter is for another model; "
                "use one for this model"
            )

    def _read(self, tensors: AdapterTensors) -> Adapter:
        """Reads this rank's part of an adapter from its tensors."""
        by_layer: dict[int, list[tuple[_Projection, str]]] = {}
        vocabulary, unknown = dict[str, str](), list[str]()
        for module, factors in tensors.modules.items():
            name = self._internal_name(module)
            projection = self._projections.get(name)
            if name in self._vocabulary_names:
                vocabulary[name] = module
            elif projection is None or factors != LINEAR:
                unknown.append(module)
            else:
                by_layer.setdefault(projection.layer, []).append((projection, module))
        if unknown:
            raise ValueError(
                f"LoRA for {shown(unknown)} is not supported for this model: only attention and "
                "MLP projections (no experts) can have adapters. Use an adapter for this model, "
                "train with other target_modules, or merge the adapter into the model"
            )
        if not (by_layer or vocabulary):
            raise ValueError(f"{WEIGHTS_NAME} has no LoRA weights: use a complete adapter")
        return Adapter(
            layers=[
                self._layer(index, by_layer[index], tensors) if index in by_layer else None
                for index in range(len(self._layers))
            ],
            vocabulary=self._read_vocabulary(vocabulary, tensors),
        )

    def _read_vocabulary(
        self, modules: Mapping[str, str], tensors: AdapterTensors
    ) -> Sequence[LoraFactors | None]:
        """Weights of the embedding and the LM head: `modules` has their names in the file."""
        if self.vocabulary is not None:
            return self.vocabulary.read(modules, tensors)
        if modules or tensors.base_modules:
            names = list(modules.values()) or tensors.base_modules
            raise ValueError(f"LoRA for {shown(names)} requires {OPTION}")
        return ()

    def _internal_name(self, module: str) -> str:
        if self._names is None:
            return module
        name = self._names.internal_name(f"{module}.weight") or ""
        return name.removesuffix(".weight")

    def _layer(
        self, index: int, found: Sequence[tuple[_Projection, str]], tensors: AdapterTensors
    ) -> LoraFactors:
        """Weights of one layer; its projections may differ in rank."""
        linear, lora = self._linears[index], self._layers[index]
        out_features, in_features = linear.shape
        rank = max(tensors.config.rank_of(module) for _, module in found)
        a = torch.zeros(lora.weights.num_groups, rank, in_features, dtype=self._dtype)
        b = torch.zeros(out_features, rank, dtype=self._dtype)
        for projection, module in found:
            own = tensors.config.rank_of(module)
            out_size, in_size = projection.parts[0].full_shape
            first = tensors.slice(module + LINEAR.a, (own, in_size))
            second = tensors.slice(module + LINEAR.b, (out_size, own))
            columns = slice(None)
            for part in projection.parts:
                rows = slice(None)
                if part.dim == 0:
                    rows = slice(part.start, part.start + part.rows.stop - part.rows.start)
                else:
                    columns = slice(part.start, part.start + in_features)
                scaled = second[rows].float() * tensors.config.scale_of(module)
                b[part.rows, :own] = scaled.to(self._dtype)
            a[projection.group, :own] = first[:, columns].to(self._dtype)
        if linear.order is not None:
            _check_order(linear.order, lora.weights.parts)
            b = b[linear.order]
        b = b.t().contiguous()
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ValueError(
                f"{found[0][1]} has weights that are not finite in {self._dtype}: use another "
                "adapter, or another --dtype"
            )
        if self._pins:
            a, b = a.pin_memory(), b.pin_memory()
        return LoraFactors(a=a, b=b)


def _linears(model: DecoderModel) -> list[tuple[Linear, str]]:
    """The linear layers that support adapters, each with the prefix of its tensors' names.

    A head for multi-token prediction has no such layers: it does not compute the step's tokens, and
    its predictions are only drafts.
    """
    head = () if model.mtp is None else model.mtp.weight_slots()
    of_head = {id(slot.module.layer) for slot in head if slot.module is not None}
    found: dict[int, tuple[Linear, str]] = {}
    for slot in model.weight_slots():
        if slot.module is not None:
            layer, prefix = slot.module
            assert isinstance(layer, Linear), "a module is a linear layer"
            if layer.supports_lora and id(layer) not in of_head:
                found.setdefault(id(layer), (layer, prefix))
    return list(found.values())


def _joined(parts: Sequence[WeightPart], groups: Sequence[int]) -> list[LoraPart]:
    """Output features by projection; adjacent parts of a projection are merged."""
    joined: list[LoraPart] = []
    for part, group in zip(parts, groups, strict=True):
        rows = part.rows
        if joined and joined[-1].group == group:
            joined[-1] = joined[-1]._replace(stop=rows.stop)
        else:
            joined.append(LoraPart(rows.start, rows.stop, group))
    return joined


def _check_order(order: torch.Tensor, parts: Sequence[LoraPart]) -> None:
    """Asserts that reordered output features stay within their projections."""
    for start, stop, _ in parts:
        rows = order[start:stop]
        assert ((rows >= start) & (rows < stop)).all(), "reordered among projections"
