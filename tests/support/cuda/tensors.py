"""Tensors that report a CUDA device, but are in host memory or without storage.

`DeviceTensor` wraps a tensor on CPU, or on torch's meta device if values do not matter. It reports
the device "cuda:0", so that all CUDA branches run unchanged. Each operation passes through a
`StandIn`. It rejects mixed devices as a real device does, and notifies a watcher of launches, the
memory that they read and write, and waits of the host. Then it computes immediately.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

DEVICE = torch.device("cuda", 0)
ATEN = torch.ops.aten
_SOURCES = ("/worker/", "/kernels/")

_WHOLE = {ATEN.linear.default, ATEN.matmul.default}
"""Composite operations that count as one launch."""
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WAITS = {"_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "_unique2"}
"""Operations whose result the host needs before it can continue."""
_COPIES = {"copy_", "_to_copy"}


class DeviceMix(AssertionError):
    """Raised if an operation mixes device tensors with others."""


class Memory:
    """One allocation. It is freed when the last tensor in it is gone.

    Args:
        num_bytes: size in bytes.
        on_free: called when it is freed.
        is_pinned: whether it is pinned host memory, for asynchronous copies.
    """

    def __init__(
        self,
        num_bytes: int,
        on_free: Callable[[Memory], None] | None = None,
        *,
        is_pinned: bool = False,
    ) -> None:
        self.num_bytes = num_bytes
        self.is_pinned = is_pinned
        self.site = site()
        self._on_free = on_free
        self.notes: Any = None
        """State of the watcher."""

    def __del__(self) -> None:
        if self._on_free is not None:
            self._on_free(self)


class Region(NamedTuple):
    """Part of an allocation that an operation touches."""

    memory: Memory
    tensor: torch.Tensor
    """Content of the region, on CPU or on torch's meta device."""
    rows: torch.Tensor | None = None
    """Rows of the tensor's first dimension that are touched; None for all."""


class Launch(NamedTuple):
    """Work submitted to one stream."""

    name: str
    reads: Sequence[Region]
    writes: Sequence[Region]
    again: Callable[[], Launch] | None = None
    """Function that repeats the work, from and to the same memory."""


class Watcher(Protocol):
    """Receives notifications about memory, launches and waits."""

    def allocated(self, memory: Memory) -> None:
        """Called for new memory on the device, from the allocator's pool of the current stream."""
        ...

    def freed(self, memory: Memory) -> None:
        """Called when memory has been freed."""
        ...

    def launched(self, launch: Launch) -> None:
        """Called when work has been submitted to the current stream."""
        ...

    def touched(self, region: Region, *, write: bool) -> None:
        """Called when the host reads or writes pinned memory."""
        ...

    def waited(self, what: str) -> None:
        """Called when the host would wait for the current stream; may raise."""
        ...


class DeviceTensor(torch.Tensor):
    """A tensor on the fake device."""

    content: torch.Tensor
    memory: Memory
    owner: StandIn

    @staticmethod
    def __new__(cls, content: torch.Tensor, memory: Memory, owner: StandIn) -> DeviceTensor:
        # A view of a tensor from outside inference mode is not an inference tensor either.
        with torch.inference_mode(content.is_inference()):
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                content.shape,
                strides=content.stride(),
                storage_offset=content.storage_offset(),
                dtype=content.dtype,
                device=DEVICE,
            )
        return made

    def __init__(self, content: torch.Tensor, memory: Memory, owner: StandIn) -> None:
        self.content, self.memory, self.owner = content, memory, owner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch does not say that it is one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return next(_device_tensors(args)).owner.run(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """Context in which tensors can be created on, and copied to, the device.

    Args:
        watcher: receives notifications.
        place: "cpu" computes; "meta" only has shapes, and copies from it are zeros.
    """

    def __init__(self, watcher: Watcher, place: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.watcher = watcher
        self.pinned: dict[int, Memory] = {}
        """Pinned memory, keyed by address."""
        self._place = torch.device(place)
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        """Memory, keyed by the address of torch's storage object."""
        self._kept: list[torch.Tensor] = []
        """Pinned tensors, which are kept alive so that their addresses are not reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a CPU tensor as pinned in place."""
        storage = tensor.untyped_storage()
        self._kept.append(tensor)
        self.pinned[storage.data_ptr()] = Memory(storage.nbytes(), is_pinned=True)
        return tensor

    def touch(self, tensor: torch.Tensor, *, write: bool) -> None:
        """Reports that the host reads or writes a CPU tensor; ignored unless it is pinned."""
        if not isinstance(tensor, DeviceTensor) and (region := self.region(tensor)) is not None:
            self.watcher.touched(region, write=write)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation on any device."""
        name = func._schema.name.removeprefix("aten::")
        on_device = any(True for _ in _device_tensors((args, kwargs)))
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == DEVICE.type
        if func is torch.ops.prim.device.default:
            return DEVICE if on_device else func(*args, **kwargs)
        if kwargs.get("pin_memory") or name in ("pin_memory", "_pin_memory"):
            return self._pin(name, func, args, kwargs)
        if not on_device and not to_device:
            return func(*args, **kwargs)
        if func not in _WHOLE and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if name in _COPIES:
            return self._copy(name, func, args, kwargs)
        self._check_mix(name, args, kwargs)
        if name in _WAITS or _has_mask_index(name, args):
            self.watcher.waited(name)
        if to_device:
            kwargs = {**kwargs, "device": self._place}
        contents, options = _unwrap(args), _unwrap(kwargs)
        result = func(*contents, **options)
        wrapped, fresh = self._wrap(result, (args, kwargs))
        if func._schema.is_mutable or (fresh and name not in _ALLOCATIONS):
            self._launch(
                *(name, partial(func, *contents, **options), result, fresh),
                partial(self.touches, func, contents, options),
            )
        return wrapped

    def opaque(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function of tensors that counts as one launch, with any number of operations on
        CPU."""
        contents, options = _unwrap(args), _unwrap(kwargs)
        trace = _Trace(self)

        def run() -> Any:
            with trace:
                return function(*contents, **options)

        result = run()
        wrapped, fresh = self._wrap(result, (args, kwargs))
        self._launch(name, run, result, fresh, trace.take)
        return wrapped

    def touches(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Region], list[Region]]:
        """Device memory that an operation on contents reads and writes."""
        reads, writes = list[Region](), list[Region]()
        for number, (argument, is_written) in enumerate(_arguments(func)):
            value = args[number] if number < len(args) else kwargs.get(argument)
            for tensor in _tensors(value):
                memory = self._memories.get(tensor.untyped_storage()._cdata)
                if memory is not None:
                    rows = _rows(func, args) if number == 0 else None
                    (writes if is_written else reads).append(Region(memory, tensor, rows))
        return reads, writes

    def region(self, tensor: torch.Tensor) -> Region | None:
        """The region of a whole device or pinned tensor; None for others."""
        if isinstance(tensor, DeviceTensor):
            return Region(tensor.memory, tensor.content)
        memory = self._pinned_memory(tensor)
        return None if memory is None else Region(memory, tensor)

    def _pinned_memory(self, tensor: torch.Tensor) -> Memory | None:
        if tensor.is_meta:
            return None
        return self.pinned.get(tensor.untyped_storage().data_ptr())

    def _wrap(self, result: Any, given: Any) -> tuple[Any, list[torch.Tensor]]:
        """Results as device tensors, and the contents that have new memory."""
        sources = {id(source.content): source for source in _device_tensors(given)}
        fresh: list[torch.Tensor] = []

        def wrap(one: torch.Tensor) -> torch.Tensor:
            if id(one) in sources:
                return sources[id(one)]
            storage = one.untyped_storage()
            memory = self._memories.get(storage._cdata)
            if memory is None:
                memory = self._memories[storage._cdata] = Memory(
                    storage.nbytes(), self.watcher.freed
                )
                self.watcher.allocated(memory)
                fresh.append(one)
            return DeviceTensor(one, memory, self)

        return _map_tensors(result, wrap), fresh

    def _launch(
        self,
        name: str,
        compute: Callable[[], Any],
        result: Any,
        fresh: Sequence[torch.Tensor],
        touched: Callable[[], tuple[Sequence[Region], Sequence[Region]]],
    ) -> None:
        """Reports a launch that created `result`, of which `fresh` has new memory."""

        def tell() -> Launch:
            reads, writes = touched()
            made = [
                Region(memory, one)
                for one in fresh
                if (memory := self._memories.get(one.untyped_storage()._cdata)) is not None
            ]
            return Launch(name, reads, [*writes, *made], again)

        def again() -> Launch:
            for old, new in zip(_tensors(result), _tensors(compute()), strict=True):
                if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
            return tell()

        self.watcher.launched(tell())

    def _copy(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies between host and device, or on the device."""
        written: torch.Tensor
        if name == "copy_":
            target, source = args[:2]
            is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            content, written = _unwrap(source), _unwrap(target)
            goes_down, result = not isinstance(target, DeviceTensor), target
        else:
            source, content = args[0], _unwrap(args[0])
            goes_down = torch.device(kwargs.get("device") or DEVICE).type == "cpu"
            is_async = bool(kwargs.get("non_blocking"))
            place = torch.device("cpu") if goes_down else self._place
            own = {**kwargs, "device": place, "non_blocking": False}
            if content.is_meta and goes_down:
                content = torch.zeros(content.shape, dtype=content.dtype)
            written = func(content, *args[1:], **own)
            result = written if goes_down else self._wrap(written, ())[0]

        def compute() -> torch.Tensor:
            if content.is_meta and not written.is_meta:
                written.zero_()
            elif not written.is_meta:
                ATEN.copy_.default(written, content)
            return written

        if name == "copy_":
            compute()
        if not isinstance(source, DeviceTensor) and source.dim() == 0:
            source = result  # a number, which is an argument of the launch
        if (goes_down or not isinstance(source, DeviceTensor)) and result.numel():
            host = result if goes_down else source
            way = "to" if goes_down else "from"
            if not is_async:
                self.watcher.waited(f"a copy {way} the host that blocks")
            elif self.region(host) is None:
                self.watcher.waited(f"a copy {way} pageable memory")
        self._launch("copy_", compute, written, (), partial(self._ends, _unwrap(source), written))
        return result

    def _ends(
        self, source: torch.Tensor, target: torch.Tensor
    ) -> tuple[list[Region], list[Region]]:
        """Device and pinned memory that a copy reads and writes."""
        found = []
        for one in (source, target):
            storage = one.untyped_storage()
            memory = self._memories.get(storage._cdata) or self._pinned_memory(one)
            found.append([] if memory is None else [Region(memory, one)])
        return found[0], found[1]

    def _pin(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in ("pin_memory", "_pin_memory"):
            self.touch(args[0], write=False)
            return self.pin(args[0].clone())
        return self.pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _check_mix(self, name: str, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            if not isinstance(tensor, DeviceTensor) and tensor.dim():
                raise DeviceMix(f"{name} at {site()}: {list(tensor.shape)} is on {tensor.device}")


class _Trace(TorchDispatchMode):
    """Records the memory that operations on contents touch."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._stand_in = stand_in
        self._reads: list[Region] = []
        self._writes: list[Region] = []

    def take(self) -> tuple[list[Region], list[Region]]:
        """Reads and writes since the last call."""
        taken, self._reads, self._writes = (self._reads, self._writes), [], []
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads, writes = self._stand_in.touches(func, args, kwargs or {})
        if writes or not func.is_view:
            self._reads += reads
            self._writes += writes
        return func(*args, **(kwargs or {}))


def site() -> str:
    """Source location of the caller."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in _SOURCES) and "/tests/" not in path:
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


@functools.cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Name of each argument of an operation, and whether it is written to."""
    return [
        (one.name, one.alias_info is not None and one.alias_info.is_write)
        for one in func._schema.arguments
    ]


_NO_TENSORS = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, dictionaries and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _NO_TENSORS):
        return  # the common case, before checks that take longer
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _device_tensors(value: Any) -> Iterator[DeviceTensor]:
    return (one for one in _tensors(value) if isinstance(one, DeviceTensor))


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value, with its tensors replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_map_tensors(part, change) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = {name: _map_tensors(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **changes)
    return value


def _unwrap(value: Any) -> Any:
    return _map_tensors(value, lambda one: one.content if isinstance(one, DeviceTensor) else one)


_BY_ROWS = {"index_select": 2, "index_copy_": 2, "index_fill_": 2, "index_add_": 2}
"""Operations on rows of their first argument along a dimension, and the argument with the row
indices."""


def _rows(func: Any, args: Any) -> torch.Tensor | None:
    """Rows of the operation's first argument that it touches; None for all."""
    name = func._schema.name.removeprefix("aten::")
    rows: torch.Tensor | None = None
    if name in _BY_ROWS and args[1] == 0:
        rows = args[_BY_ROWS[name]]
    elif name in ("index", "index_put_") and not _has_mask_index(name, args):
        rows = args[1][0]
    return None if rows is None or args[0].is_meta else rows


def _has_mask_index(name: str, args: Any) -> bool:
    if name not in ("index", "index_put_", "index_put"):
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))


@contextmanager
def patched_tensors() -> Iterator[None]:
    """Context in which methods of torch.Tensor that bypass dispatch modes, or need a CUDA build,
    are replaced."""
    base = torch._C.TensorBase

    def getitem(tensor: torch.Tensor, index: Any) -> Any:
        if not isinstance(tensor, DeviceTensor):
            return base.__getitem__(tensor, index)
        part, tensors = _pick(tensor, index)
        if tensors:
            return ATEN.index.Tensor(part, tensors)
        return part.view_as(part) if part is tensor else part

    def setitem(tensor: torch.Tensor, index: Any, value: Any) -> None:
        if not isinstance(tensor, DeviceTensor):
            base.__setitem__(tensor, index, value)
            return
        part, tensors = _pick(tensor, index)
        if tensors:
            ATEN.index_put_.default(part, tensors, value)
        elif isinstance(value, torch.Tensor):
            part.copy_(value)
        else:
            part.fill_(value)

    def copy_(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
        return ATEN.copy_.default(tensor, source, non_blocking)

    def tolist(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, DeviceTensor):
            tensor.owner.watcher.waited("tolist")
            inner = tensor.content
            return base.tolist(torch.zeros_like(inner, device="cpu") if inner.is_meta else inner)
        _note_host_access(tensor, write=False)
        return base.tolist(tensor)

    def numpy(tensor: torch.Tensor, **options: Any) -> Any:
        # Arrays in pinned memory are filled by their users.
        _note_host_access(tensor, write=True)
        return base.numpy(tensor, **options)

    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.Tensor, "__getitem__", getitem)
        patch.setattr(torch.Tensor, "__setitem__", setitem)
        patch.setattr(torch.Tensor, "__invert__", torch.Tensor.bitwise_not)
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.Tensor, "tolist", tolist)
        patch.setattr(torch.Tensor, "numpy", numpy)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        yield


def _note_host_access(tensor: torch.Tensor, *, write: bool) -> None:
    mode = next(
        (m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, StandIn)), None
    )
    if mode is not None:
        mode.touch(tensor, write=write)


def _pick(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """View selected by integers, slices and None, and the tensors that index it."""
    parts = index if isinstance(index, tuple) else (index,)
    given = sum(part is not None and part is not Ellipsis for part in parts)
    place, tensors = 0, list[torch.Tensor | None]()
    picked = tensor
    for part in parts:
        if part is Ellipsis:
            place += tensor.dim() - given
        elif part is None:
            picked, place = picked.unsqueeze(place), place + 1
        elif isinstance(part, slice):
            if part != slice(None):
                picked = ATEN.slice.Tensor(picked, place, part.start, part.stop, part.step or 1)
            place += 1
        elif isinstance(part, torch.Tensor):
            tensors += [None] * (place - len(tensors)) + [part]
            place += 1
        else:
            picked = picked.select(place, int(part))
    return picked, tensors
