"""Op registry: selects the implementation of an op by the device of its tensors.

An op has a torch reference, which runs on every device, and optionally a Triton kernel. Triton is
imported when a kernel is first selected, so processes without a GPU never load it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Literal, ParamSpec, TypeVar, cast

import torch

Backend = Literal["auto", "torch", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "torch", "triton")

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """One op: its name, its torch reference and the path of its Triton kernel."""

    def __init__(
        self, registry: OpRegistry, name: str, reference: Callable[P, R], triton: str | None
    ) -> None:
        self.name = name
        self.reference = reference
        self._registry = registry
        self._triton_path = triton
        self._triton: Callable[P, R] | None = None

    @property
    def has_triton(self) -> bool:
        """Whether a Triton kernel exists for this op."""
        return self._triton_path is not None

    def select(self, tensor: torch.Tensor) -> Callable[P, R]:
        """The implementation for `tensor`: Triton if it is on CUDA, unless a backend is set."""
        backend = self._registry.backend
        if backend == "torch" or (backend == "auto" and not tensor.is_cuda):
            return self.reference
        return self._triton or self._load_triton()

    def _load_triton(self) -> Callable[P, R]:
        if self._triton_path is None:
            return self.reference
        module_name, function_name = self._triton_path.split(":")
        module = importlib.import_module(module_name)
        self._triton = cast("Callable[P, R]", getattr(module, function_name))
        return self._triton


class OpRegistry:
    """All ops by name, and the backend that selects among their implementations."""

    def __init__(self) -> None:
        self.backend: Backend = "auto"
        self._ops: dict[str, Op[..., object]] = {}

    def register(
        self, name: str, reference: Callable[P, R], *, triton: str | None = None
    ) -> Op[P, R]:
        """Adds an op; `triton` is "module:function", imported when first selected."""
        assert name not in self._ops, f"op {name} is registered twice"
        op = Op(self, name, reference, triton)
        self._ops[name] = cast("Op[..., object]", op)
        return op

    def __getitem__(self, name: str) -> Op[..., object]:
        return self._ops[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def uses_triton(self, device: torch.device) -> bool:
        """Whether ops that have a Triton kernel run it on tensors of `device`."""
        return self.backend == "triton" or (self.backend == "auto" and device.type == "cuda")

    def set_backend(self, backend: Backend) -> None:
        """Selects "auto" (Triton on CUDA), "torch" or "triton" for all ops of the process."""
        if backend not in BACKENDS:
            raise ValueError(f"unknown kernel backend {backend!r}: use one of {BACKENDS}")
        self.backend = backend

    @contextmanager
    def using(self, backend: Backend) -> Iterator[None]:
        """Selects a backend within a `with` block."""
        before = self.backend
        self.set_backend(backend)
        try:
            yield
        finally:
            self.backend = before


registry = OpRegistry()
