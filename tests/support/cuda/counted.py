"""Counts launches of a model's steps: its real classes, on tensors without storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton.runtime.jit import JITFunction

from kernels.attention import CapturableBackend
from tests.support.cuda.tensors import (
    DEVICE,
    Launch,
    Memory,
    Region,
    StandIn,
    patched_tensors,
)
from worker.config import EngineConfig
from worker.models.architectures.decoder import DecoderModel
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.native import NativeOptions, pack_weights
from worker.rank import batch, loaded_model
from worker.rank.graphs import Replay, StepGraphs
from worker.rank.runner import ModelRunner

ROWS = 4
"""Number of rows of the counted step."""
TOKENS = 64
"""Number of tokens in a step with rows of any length."""
_FOR_ALL_LAYERS = {"_schedule_kernel"}
"""Kernels that the first layer of a group launches for all layers of the group."""


class HostWait(AssertionError):
    """Raised if captured code waits for the device."""


class Counter:
    """Counts launches by name; an observer."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.grids: list[tuple[str, tuple[int, ...]]] = []
        """Grids of launches, with the name of the Triton kernel."""
        self.forbids_waits = False

    def allocated(self, memory: Memory) -> None:
        pass

    def freed(self, memory: Memory) -> None:
        pass

    def launched(self, launch: Launch) -> None:
        self.names.append(launch.name)

    def touched(self, region: Region, *, write: bool) -> None:
        pass

    def waited(self, what: str) -> None:
        if self.forbids_waits:
            raise HostWait(what)


@dataclass(frozen=True, slots=True)
class Counts:
    """Launches of one captured step."""

    layers: tuple[int, ...]
    """Number of launches per layer."""
    rest: int
    """Launches of the forward pass outside its layers."""
    draw: int
    """Logits and sampling without filters."""
    filtered: int
    """Logits and sampling with filters."""
    ragged: int
    """Launches of the forward pass of a step with rows of any length; 0 if none is captured."""

    @property
    def layer(self) -> int:
        """Number of launches of the layer with the most launches."""
        return max(self.layers)


class Idle:
    """A stub of a stream, an event or a graph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def elapsed_time(self, end_event: Idle) -> float:
        return 0.25


class _Upload:
    """Creates zeros on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        fill(np.zeros(num_bytes, dtype=np.uint8))
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _pack_unloaded(model: DecoderModel, native: NativeOptions | None) -> None:
    for _ in model.weight_slots():  # quantized weights are created with their slots
        pass
    pack_weights(model, native)


@contextmanager
def counting() -> Iterator[Counter]:
    """Context in which tensors on "cuda" have no content, and launches are counted."""
    counter = Counter()

    def launch(self: Any, *_: Any, grid: Any, warmup: bool, **__: Any) -> None:
        counter.names.append(self.fn.__name__)
        counter.grids.append((self.fn.__name__, grid))

    with pytest.MonkeyPatch.context() as patch, patched_tensors(), StandIn(counter, "meta"):
        patch.setattr(JITFunction, "run", launch)
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, Idle)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        patch.setattr(batch, "uploader_to", _Upload)
        patch.setattr(loaded_model, "fill_dummy_weights", _pack_unloaded)
        yield counter


def count_launches(
    folder: Path, prepare: Callable[[ModelRunner], object] = lambda _: None, **further: object
) -> Counts:
    """Launches of a captured step of the model with the folder's config.json.

    Args:
        folder: folder without weights.
        prepare: called with the runner before its steps are captured.
        further: options of the engine.

    Raises:
        HostWait: captured code would wait for the device.
        DeviceMix: captured code uses tensors on CPU.
    """
    captured: list[list[str]] = []
    ragged = 0
    by_layer: list[int] = []
    limits = {"max_num_seqs": ROWS, "max_num_batched_tokens": 1024}
    options = {"device": "cuda", "load_format": "dummy", **limits, **further}
    config = EngineConfig.of(model=str(folder), max_model_len=1024, page_size=32, **options)
    with counting() as counter:
        built = ModelRunner(config, TensorParallelGroup.alone(DEVICE))
        built._allocate(64)
        prepare(built)
        for layer in built.model.layers:
            _count_calls(layer, counter, by_layer)

        def capture(launch: Callable[[], None]) -> Replay:
            counter.names, counter.forbids_waits = [], True
            launch()
            captured.append([*counter.names])
            counter.forbids_waits = False
            return lambda: None

        backend = built._attention
        assert isinstance(backend, CapturableBackend)
        with torch.inference_mode():
            steps = (built.run_model, built.compute_logits, built._tables)
            sizes = ((ROWS,), capture)
            StepGraphs(*steps, *sizes, show_progress=False)
            own = list(by_layer)
            forward, *draws = map(len, captured)
            if backend.captures_ragged and built.model_config.block_size == 1:
                captured.clear()
                StepGraphs(*steps, *sizes, token_sizes=(TOKENS,), show_progress=False)
                ragged = len(captured[0])
    plain, filtered = draws or (0, 0)  # blocks are not sampled in graphs
    return Counts(tuple(own), forward - sum(own), plain, filtered, ragged)


def _count_calls(layer: Any, counter: Counter, found: list[int]) -> None:
    forward = layer.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = len(counter.names)
        result = forward(*args, **kwargs)
        found.append(sum(name not in _FOR_ALL_LAYERS for name in counter.names[before:]))
        return result

    layer.forward = counted


def _is_per_layer(key: str, value: Any, num_layers: int, num_next: int) -> bool:
    """Whether a value has an entry for each layer, possibly including multi-token prediction
    layers."""
    has_entries = isinstance(value, list) or key == "hybrid_override_pattern"
    return has_entries and len(value) in (num_layers, num_layers + num_next)


def write_config(folder: Path, config: dict[str, Any], num_layers: int) -> Path:
    """Writes a config.json with this number of layers; returns the folder."""
    text = config.get("text_config", config)
    count = "num_layers" if "num_layers" in text else "num_hidden_layers"  # EXAONE 3, LongCat
    most = text.get(count, num_layers)
    num_next = text.get("num_nextn_predict_layers") or 0
    short = {
        key: value[:num_layers] if _is_per_layer(key, value, most, num_next) else value
        for key, value in text.items()
    }
    short[count] = min(most, num_layers)
    if most > num_layers and short.get("num_kv_shared_layers"):
        short["num_kv_shared_layers"] = 1
    if sparse := short.get("sparse_attention_config"):
        short["sparse_attention_config"] = {
            key: value[:num_layers] if isinstance(value, list) else value
            for key, value in sparse.items()
        }
    if linear := short.get("linear_attn_config"):  # 1-based layer indices
        short["linear_attn_config"] = {
            key: [layer for layer in value if layer <= num_layers]
            if isinstance(value, list)
            else value
            for key, value in linear.items()
        }
    if text is not config:
        short = {**config, "text_config": short}
    (folder / "config.json").write_text(json.dumps(short), encoding="utf-8")
    return folder
