"""pytest plugin for running vLLM's tests: replaces `vllm` and records outcomes.

It is copied next to the tests and configured with environment variables. It provides the parts of
`vllm` that endpoint tests need in addition to an endpoint. Everything else can be imported, but
skips the test that uses it, because such a test is about vLLM's own code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODEL_VARIABLE = "RAYFLEET_SHIM_MODEL"
"""Folder of the served model."""
RESULTS_VARIABLE = "RAYFLEET_SHIM_RESULTS"
"""File to which outcomes are written, one JSON object per line."""
MAX_DETAIL = 600
"""Maximum length of a failure's message in characters."""


class OfVllm(type):
    """Metaclass of the stand-ins for vLLM's own classes."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Skips the test that calls it."""
        pytest.skip(f"about vLLM's own code: {cls.__name__}", allow_module_level=True)

    def __getattr__(cls, name: str) -> Any:
        """Skips the test that reads an attribute."""
        if name.startswith("__") or name == "pytestmark":
            raise AttributeError(name)
        pytest.skip(f"about vLLM's own code: {cls.__name__}.{name}", allow_module_level=True)

    def __add__(cls, other: Any) -> Any:
        """Skips the test that uses it as a number."""
        pytest.skip(f"about vLLM's own code: {cls.__name__}", allow_module_level=True)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of `vllm`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _offered().get(module.__name__, {}).items():
            setattr(module, name, value)
        setattr(module, "__getattr__", _stand_in(module.__name__))  # noqa: B010


def _stand_in(module: str) -> Callable[[str], Any]:
    def stand_in(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_error = module == "vllm.exceptions" or name.endswith("Error")
        return OfVllm(f"{module}.{name}", (Exception,) if is_error else (), {})

    return stand_in


def _offered() -> Mapping[str, Mapping[str, Any]]:
    """Available objects of `vllm`, keyed by module and name."""
    return {
        "vllm.config": {"ModelConfig": _ModelConfig},
        "vllm.envs": {"VLLM_USE_RUST_FRONTEND": False},
        "vllm.model_executor.model_loader.weight_utils": {
            "download_weights_from_hf": lambda *_, **__: "no-weights"
        },
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.tokenizers": {"get_tokenizer": _tokenizer},
        "vllm.transformers_utils.repo_utils": {
            "hf_api": lambda: SimpleNamespace(snapshot_download=lambda *_, **__: "no-adapter")
        },
        "vllm.version": {"__version__": importlib.metadata.version("rayfleet")},
    }


class _ModelConfig:
    """Configuration of the served model."""

    def __init__(self, model: str = "", **_: Any) -> None:
        self._config = json.loads((_folder() / "config.json").read_text())

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


class _Platform:
    """Platform without devices."""

    def device_count(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: False


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(_folder())


def _folder() -> Path:
    return Path(os.environ[MODEL_VARIABLE])


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    """Folder of the adapter, which /v1/models does not reveal: `root` is its name."""
    return "qwen3-lora"


def pytest_load_initial_conftests() -> None:
    """Makes all of `vllm` importable before test files are imported."""
    sys.meta_path.insert(0, _Finder())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Records the outcome of a test's setup, call or teardown."""
    is_passed_part = report.when != "call" and report.passed
    if not is_passed_part:
        _write(report.nodeid, report.outcome, report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Records a file whose tests cannot be collected, or are all skipped."""
    if not report.passed:
        _write(report.nodeid, report.outcome, report.longrepr)


def _write(test: str, outcome: str, problem: Any) -> None:
    if outcome == "skipped" and isinstance(problem, tuple):
        detail = str(problem[2])
    elif (crash := getattr(problem, "reprcrash", None)) is not None:
        detail = str(crash.message)[:MAX_DETAIL]
    else:
        detail = str(problem or "")[-MAX_DETAIL:]
    line = {"test": test, "outcome": outcome, "detail": detail}
    with Path(os.environ[RESULTS_VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
