"""Stand-in for `tests/utils.py` of vLLM's tests, with servers that are already running.

It is copied to that path in the tests' folder and configured with environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    import anthropic
    import openai

URL_VARIABLE = "RAYFLEET_SHIM_URL"
"""URL of the server without a path."""
MODELS_VARIABLE = "RAYFLEET_SHIM_MODELS"
"""Served model names, separated by commas."""
CLIENT_TIMEOUT_S = 600.0
"""Same as in vLLM."""

VLLM_PATH = Path(__file__).parent.parent
ROCM_EXTRA_ARGS: list[str] = []


class RemoteOpenAIServer:
    """The running server, regardless of the arguments with which a test would start one.

    Args:
        model: the test's model; the test is skipped if the server has no model of this name.
        vllm_serve_args: ignored, except for served model names.
        env_dict: ignored.
        options: ignored.
    """

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        args = list(vllm_serve_args)
        if "--served-model-name" in args:
            model = args[args.index("--served-model-name") + 1]
        if model not in os.environ[MODELS_VARIABLE].split(","):
            pytest.skip(f"needs the model {model}")
        self.url_root = os.environ[URL_VARIABLE]
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> Self:
        """Returns the server."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Does nothing: the server keeps running."""

    def url_for(self, *parts: str) -> str:
        """URL of a path given in parts."""
        return "/".join((self.url_root, *(part.strip("/") for part in parts if part)))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI client of the server."""
        import openai

        return openai.OpenAI(**self._client_options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Asynchronous OpenAI client for the server."""
        import openai

        return openai.AsyncOpenAI(**self._client_options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic client for the server; its import takes 1.5 s."""
        import anthropic

        return anthropic.Anthropic(**self._client_options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Asynchronous Anthropic client for the server."""
        import anthropic

        return anthropic.AsyncAnthropic(**self._client_options("", options))

    def _client_options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": self.url_for(path),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": CLIENT_TIMEOUT_S,
            **options,
        }


def multi_gpu_only(*, num_gpus: int = 2) -> pytest.MarkDecorator:
    """Marks a test that needs several GPUs."""
    return pytest.mark.skip(reason=f"needs {num_gpus} GPUs")


def requires_fp8(test: Any) -> Any:
    """Marks a test that needs a GPU with FP8."""
    return pytest.mark.skip(reason="needs a GPU with FP8")(test)
