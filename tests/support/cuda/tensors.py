"""Tensors that say they are on a CUDA device and lie in host memory, or nowhere at all.

`DeviceTensor` wraps a tensor on CPU, or on torch's meta device where values do not matter. To all
who ask, its device is "cuda:0", so that every branch for CUDA runs as it is. Each operation on one
passes a `StandIn`, which refuses what a device would refuse (a mixture of devices), tells a watcher
what a stream would be given (launches, with the memory that they read and write) and what the host
would wait for, and computes at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
"""Composite operations that are one launch."""
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WAITS = {"_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "_unique2"}
"""Operations whose result the host has to know before it goes on."""
_COPIES = {"copy_", "_to_copy"}


class DeviceMix(AssertionError):
    """An operation on tensors of the device and others."""


class Memory:
    """One allocation. It is freed when the last tensor in it is gone.

    Args:
        num_bytes: its size.
        on_free: told then.
        is_pinned: whether it is the host's, for copies that nobody waits for.
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
        """Whatever a watcher keeps."""

    def __del__(self) -> None:
        if self._on_free is not None:
            self._on_free(self)


class Region(NamedTuple):
    """Part of an allocation that an operation touches."""

    memory: Memory
    tensor: torch.Tensor
    """Where it lies; on CPU or on torch's meta device."""
    rows: torch.Tensor | None = None
    """Those of its first dimension alone; None for all."""


class Launch(NamedTuple):
    """What one stream is given to do."""

    name: str
    reads: Sequence[Region]
    writes: Sequence[Region]
    again: Callable[[], None] | None = None
    """Does it once more, from and to the same memory."""


class Watcher(Protocol):
    """Is told what happens."""

    def allocated(self, memory: Memory) -> None:
        """New memory on the device, from the cache of the current stream."""
        ...

    def freed(self, memory: Memory) -> None:
        """Nobody holds it any more."""
        ...

    def launched(self, launch: Launch) -> None:
        """The current stream is given something to do."""
        ...

    def touched(self, region: Region, *, write: bool) -> None:
        """The host reads or writes pinned memory."""
        ...

    def waited(self, what: str) -> None:
        """The host would wait for the current stream; may raise."""
        ...


class DeviceTensor(torch.Tensor):
    """A tensor of the stand-in."""

    content: torch.Tensor
    memory: Memory
    owner: StandIn

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory, owner: StandIn) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        return made

    def __init__(self, inner: torch.Tensor, memory: Memory, owner: StandIn) -> None:
        self.content, self.memory, self.owner = inner, memory, owner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch does not say that it is one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return next(_device_tensors(args)).owner.run(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """In a `with` block tensors can be made on, and copied to, the device.

    Args:
        watcher: is told what happens.
        place: "cpu" computes; "meta" knows shapes alone, and what comes from there is zeros.
    """

    def __init__(self, watcher: Watcher, place: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.watcher = watcher
        self._place = torch.device(place)
        self._pinned: dict[int, tuple[torch.Tensor, Memory]] = {}
        """By address. Kept, so that no two allocations ever have the same one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def wrap(self, inner: torch.Tensor, memory: Memory | None = None) -> DeviceTensor:
        """A tensor of the device; in new memory unless said otherwise."""
        if memory is None:
            memory = Memory(inner.untyped_storage().nbytes(), self.watcher.freed)
            self.watcher.allocated(memory)
        return DeviceTensor(inner, memory, self)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declares a tensor on CPU pinned where it lies."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = tensor, Memory(storage.nbytes(), is_pinned=True)
        return tensor

    def touch(self, tensor: torch.Tensor, *, write: bool) -> None:
        """The host reads or writes a tensor on CPU; of no interest unless that is pinned."""
        region = self._host_region(tensor)
        if region is not None:
            self.watcher.touched(region, write=write)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation, on whatever device."""
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
        return self._compute(name, func, args, kwargs)

    def _compute(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = list(_device_tensors((args, kwargs)))
        result = func(*_unwrap(args), **_unwrap(kwargs))
        wrapped, fresh = self._wrap_results(result, inputs)
        written = _written(func, args, kwargs)
        if written or (fresh and name not in _ALLOCATIONS):
            reads = _regions(name, args, kwargs, inputs)
            writes = [*_write_regions(name, args, written), *map(_whole, fresh)]
            self.watcher.launched(Launch(name, reads, writes))
        return wrapped

    def _wrap_results(
        self, result: Any, inputs: Sequence[DeviceTensor]
    ) -> tuple[Any, list[DeviceTensor]]:
        """The results as tensors of the device, and those of them that have new memory."""
        fresh: list[DeviceTensor] = []

        def wrap(one: Any) -> Any:
            if isinstance(one, (list, tuple)):
                return type(one)(map(wrap, one))
            if not isinstance(one, torch.Tensor):
                return one
            for source in inputs:
                if source.content is one:
                    return source
                if source.content.untyped_storage()._cdata == one.untyped_storage()._cdata:
                    return self.wrap(one, source.memory)
            fresh.append(self.wrap(one))
            return fresh[-1]

        return wrap(result), fresh

    def _copy(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Between host and device, or on the device."""
        source = args[1] if name == "copy_" else args[0]
        if name == "copy_":
            target: torch.Tensor | None = args[0]
            goes_down = not isinstance(target, DeviceTensor)
            is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        else:
            target, goes_down = None, torch.device(kwargs.get("device") or DEVICE).type == "cpu"
            is_async = bool(kwargs.get("non_blocking"))
        comes_up = not isinstance(source, DeviceTensor)
        if comes_up and source.dim() == 0 and not source.untyped_storage().nbytes() > 8:
            is_async = comes_up = False  # a number, an argument of the launch
        inner = _unwrap(source)
        if target is None:
            own = {**kwargs, "device": "cpu" if goes_down else self._place, "non_blocking": False}
            if inner.is_meta and goes_down:
                inner = torch.zeros(inner.shape, dtype=inner.dtype)
            made = func(inner, *args[1:], **own)
            result: torch.Tensor = made if goes_down else self.wrap(made)
        else:
            result, written = target, _unwrap(target)
            if not (inner.is_meta or written.is_meta):
                func(written, inner)
            elif inner.is_meta and not written.is_meta:
                written.zero_()
        self._tell_copy(source, result, is_async=is_async, crosses=comes_up or goes_down)
        return result

    def _tell_copy(
        self, source: torch.Tensor, target: torch.Tensor, *, is_async: bool, crosses: bool
    ) -> None:
        ends = [self._region(source), self._region(target)]
        if crosses and target.numel():
            host = target if isinstance(source, DeviceTensor) else source
            if not is_async:
                self.watcher.waited(f"a copy {_way(source)} that blocks")
            elif not self.is_pinned(host):
                self.watcher.waited(f"a copy {_way(source)} pageable memory")
        reads, writes = ([] if end is None else [end] for end in ends)
        self.watcher.launched(Launch("copy_", reads, writes))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on CPU is in pinned memory."""
        return self._host_region(tensor) is not None

    def _region(self, tensor: torch.Tensor) -> Region | None:
        return _whole(tensor) if isinstance(tensor, DeviceTensor) else self._host_region(tensor)

    def _host_region(self, tensor: torch.Tensor) -> Region | None:
        if isinstance(tensor, DeviceTensor) or tensor.is_meta:
            return None
        found = self._pinned.get(tensor.untyped_storage().data_ptr())
        return None if found is None else Region(found[1], tensor)

    def _pin(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in ("pin_memory", "_pin_memory"):
            self.touch(args[0], write=False)
            return self.pin(args[0].clone())
        return self.pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _check_mix(self, name: str, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            if not isinstance(tensor, DeviceTensor) and tensor.dim():
                raise DeviceMix(f"{name} at {site()}: {list(tensor.shape)} is on {tensor.device}")


def site() -> str:
    """Where in the sources the caller is."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in _SOURCES) and "/tests/" not in path:
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


def _whole(tensor: DeviceTensor) -> Region:
    return Region(tensor.memory, tensor.content)


def _way(source: torch.Tensor) -> str:
    return "to" if isinstance(source, DeviceTensor) else "from"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _device_tensors(value: Any) -> Iterator[DeviceTensor]:
    return (one for one in _tensors(value) if isinstance(one, DeviceTensor))


def _unwrap(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.content
    if isinstance(value, dict):
        return {key: _unwrap(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrap, value))
    return value


def _written(func: Any, args: Any, kwargs: Any) -> list[DeviceTensor]:
    """Arguments that the operation changes."""
    found: list[DeviceTensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += _device_tensors(value)
    return found


_BY_ROWS = {"index_select": 2, "index_copy_": 2, "index_fill_": 2, "index_add_": 2}
"""Operations on rows of their first argument along a dimension, and which argument names them."""


def _rows(name: str, args: Any) -> torch.Tensor | None:
    """Which rows of its first argument the operation touches; None for all."""
    if name in _BY_ROWS and args[1] == 0 and not args[0].content.is_meta:
        rows: torch.Tensor = _unwrap(args[_BY_ROWS[name]])
        return rows
    return None


def _regions(name: str, args: Any, kwargs: Any, inputs: Sequence[DeviceTensor]) -> list[Region]:
    regions = list(map(_whole, inputs))
    if inputs and inputs[0] is args[0]:
        regions[0] = regions[0]._replace(rows=_rows(name, args))
    return regions


def _write_regions(name: str, args: Any, written: Sequence[DeviceTensor]) -> list[Region]:
    return [
        _whole(tensor)._replace(rows=_rows(name, args) if tensor is args[0] else None)
        for tensor in written
    ]


def _has_mask_index(name: str, args: Any) -> bool:
    if name not in ("index", "index_put_", "index_put"):
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))


@contextmanager
def patched_tensors() -> Iterator[None]:
    """Inside, methods of torch.Tensor that pass no dispatch mode, or that ask for a CUDA build, do
    without."""
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
        # Whoever takes an array of pinned memory fills it.
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
    """The view that whole numbers, slices and None select, and the tensors that index it."""
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
