"""Triton's interpreter, which needs a separate process because it is selected when Triton is
imported."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.paths import ROOT

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process runs the interpreter."""
TIMEOUT_S = 2000
"""Timeout in seconds; the tests take a minute on an idle machine."""


def run_interpreted(*folders: str, selection: str) -> None:
    """Runs pytest under Triton's interpreter, whose variable must be set before the import.

    Args:
        folders: folders of the tests.
        selection: expression of pytest's `-m`.
    """
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            selection,
            *folders,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]


@functools.cache
def hasten_interpreter() -> None:
    """Skips work of the interpreter whose results are unused or known, which takes 2/3 of a
    launch's time.

    Changes Triton for the rest of the process. HAZARD: these are Triton 3.7's private names.
    """
    from triton.runtime import interpreter

    # The interpreter repeats 32-bit additions and multiplications in 64 bits for an assertion that
    # no kernel makes.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows would be asserted"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # Each time a kernel calls a function, the interpreter searches triton.language for names to
    # patch. The first call has already patched them, and they are not restored between launches.
    replace = interpreter._patch_lang

    @functools.cache
    def replace_once(function: Callable[..., object]) -> SimpleNamespace:
        replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
    _keep_types()
    _round_to_fp8()


def _round_to_fp8() -> None:
    """Converts float32 to e4m3 with torch, which rounds like devices. The interpreter loses carries
    into the exponent, and truncates subnormal numbers."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, rounding)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted


def _keep_types() -> None:
    """Caches shapes and types of tensors instead of creating them in every operation."""
    from triton.language import core
    from triton.runtime import interpreter

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[object, ...], Any] = {}
    numpy_types: dict[str, Any] = {}
    make_tensor, make_block = core.tensor.__init__, core.block_type.__init__
    find_numpy_type = interpreter._get_np_dtype

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self
            return
        known = blocks[key]
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known.shape, known.numel, known.name

    def numpy_type(of: Any) -> Any:
        if of.name not in numpy_types:
            numpy_types[of.name] = find_numpy_type(of)
        return numpy_types[of.name]

    core.tensor.__init__ = tensor
    core.block_type.__init__ = block
    interpreter._get_np_dtype = numpy_type
