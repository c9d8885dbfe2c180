"""Op registry: declares ops, and selects their implementations by the device of tensors.

`@op` declares an op with its torch reference, which runs on every device; the op has the
reference's signature and docstring. `@implements(OP, "triton")` registers a kernel with the same
signature. It is in `triton_kernel.py` of the op's package, which is imported when the kernel is
first called, so processes without a GPU never load Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, get_args

import torch

Kernel = Literal["triton"]
"""Implementations besides the reference, each in a file `{name}_kernel.py` of an op's package."""
Backend = Literal["auto", "torch", Kernel]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

P = ParamSpec("P")
R = TypeVar("R")
Reference = TypeVar("Reference", bound=Callable[Concatenate[torch.Tensor, ...], object])


class Op(Generic[P, R]):
    """All implementations of one op, and those that are selected for CPU and for CUDA."""

    on_cpu: Callable[P, R]
    """Implementation for CPU tensors."""
    on_cuda: Callable[P, R]
    """Implementation for CUDA tensors."""

    def __init__(self, registry: OpRegistry, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self._registry = registry
        self.package = reference.__module__.removesuffix(".reference")
        self._kernels: dict[Kernel, Callable[P, R]] = {}
        self.select()

    def select(self) -> None:
        """Selects implementations by the registry's backend; "auto" is Triton on CUDA."""
        backend = self._registry.backend
        self.on_cpu = self._implementation("torch" if backend == "auto" else backend)
        self.on_cuda = self._implementation("triton" if backend == "auto" else backend)

    def register(self, name: Kernel, kernel: Callable[P, R]) -> None:
        """Adds a kernel, and selects it if it belongs to the selected backend."""
        self._kernels[name] = kernel
        self.select()

    def has_kernel(self, name: Kernel) -> bool:
        """Whether the op's package contains the kernel `name`."""
        return importlib.util.find_spec(f"{self.package}.{name}_kernel") is not None

    def _implementation(self, name: Literal["torch", Kernel]) -> Callable[P, R]:
        return self.reference if name == "torch" else self._kernels.get(name) or self._first(name)

    def _first(self, name: Kernel) -> Callable[P, R]:
        """Implementation until a kernel is registered: imports the kernel, or selects the reference
        if the op has no kernel, and runs it."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if self.has_kernel(name):
                importlib.import_module(f"{self.package}.{name}_kernel")
            else:
                self.register(name, self.reference)
            return self._kernels[name](*args, **kwargs)

        return run


class OpRegistry:
    """All ops by name, and the backend that selects among their implementations."""

    def __init__(self) -> None:
        self.backend: Backend = "auto"
        self._ops: dict[str, Op[..., object]] = {}

    def op(self, reference: Reference) -> Reference:
        """Decorator for a torch reference: declares an op of this name and signature.

        The result calls the implementation for the device of the first argument.
        """
        name = reference.__name__
        assert name not in self._ops, f"op {name} is declared twice"
        self._ops[name] = Op(self, reference)
        return cast("Reference", _dispatcher(self._ops[name]))

    def implements(
        self, op: Callable[P, R], kernel: Kernel
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator for a kernel's launcher: registers it for an op with the same signature."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            cast("Op[P, R]", self._ops[op.__name__]).register(kernel, function)
            return function

        return register

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
            raise ValueError(
                f"unknown kernel backend {backend!r}: choose from {', '.join(BACKENDS)}"
            )
        self.backend = backend
        for op in self._ops.values():
            op.select()

    @contextmanager
    def using(self, backend: Backend) -> Iterator[None]:
        """Selects a backend within a `with` block."""
        before = self.backend
        self.set_backend(backend)
        try:
            yield
        finally:
            self.set_backend(before)


def _dispatcher(op: Op[..., object]) -> Callable[..., object]:
    """A function with the parameters of an op, which calls its implementation.

    It is generated, like `__init__` of a dataclass: forwarding `*args, **kwargs` would take 0.2 to
    0.8 us per call.
    """
    parameters = inspect.signature(op.reference).parameters.values()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(names) + len(keywords) == len(parameters), f"{op.name} needs named parameters"
    signature = ", ".join([*names, *(["*", *keywords] if keywords else [])])
    arguments = ", ".join([*names, *(f"{name}={name}" for name in keywords)])
    source = (
        f"def {op.name}({signature}):\n"
        f"    return (_op.on_cuda if {names[0]}.is_cuda else _op.on_cpu)({arguments})\n"
    )
    namespace: dict[str, object] = {"_op": op}
    exec(compile(source, f"<op {op.name}>", "exec"), namespace)
    function = cast("Callable[..., object]", namespace[op.name])
    function.__defaults__ = op.reference.__defaults__
    function.__kwdefaults__ = op.reference.__kwdefaults__
    return functools.wraps(op.reference)(function)


registry = OpRegistry()
op, implements = registry.op, registry.implements
