"""Loads xgrammar's C++ core without its Python package.

`import xgrammar` imports torch and transformers for convenience functions that are not used: it
takes 1.8 s and 190 MB instead of 0.1 s and 20 MB. Coordinators on CPU and compiling processes must
not import torch, so the core's bindings are imported without the package's `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

from worker.core.grammar.base import GrammarError, Words


@dataclass(frozen=True, slots=True)
class XGrammarCore:
    """Bindings of xgrammar's core, and conversion of arrays for them."""

    bindings: Any
    """Module with TokenizerInfo, GrammarCompiler, CompiledGrammar, GrammarMatcher, Grammar."""
    to_tensor: Any
    """Converts a numpy array to a view that the bindings can write to."""

    def view(self, words: Words) -> Any:
        """View of a mask as a batch of one, [1, words]."""
        return self.to_tensor(words.reshape(1, -1))


def load_core() -> XGrammarCore:
    """Imports the core of the installed xgrammar.

    Raises:
        GrammarError: xgrammar is not installed.
    """
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise GrammarError("xgrammar is not installed: pip install xgrammar")
    before = {name: sys.modules[name] for name in sys.modules if _is_xgrammar(name)}
    hides_torch = "torch" not in sys.modules
    try:
        if not before:
            package = types.ModuleType("xgrammar")
            package.__path__ = list(spec.submodule_search_locations)
            sys.modules["xgrammar"] = package
            if hides_torch:
                # A None entry makes an import fail immediately, and tvm_ffi also works without
                # torch.
                sys.modules["torch"] = None  # type: ignore[assignment]
        importlib.import_module("xgrammar.load_binding")
        base = importlib.import_module("xgrammar.base")
        to_tensor = importlib.import_module("tvm_ffi").from_dlpack
    finally:
        if hides_torch and sys.modules.get("torch", 0) is None:
            del sys.modules["torch"]
        if not before:
            # A later import of xgrammar must import the whole package.
            for name in [name for name in sys.modules if _is_xgrammar(name)]:
                del sys.modules[name]
    return XGrammarCore(bindings=base._core, to_tensor=to_tensor)


def _is_xgrammar(name: str) -> bool:
    return name == "xgrammar" or name.startswith("xgrammar.")
