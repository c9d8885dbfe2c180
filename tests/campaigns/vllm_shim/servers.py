"""Takes the place of `tests/utils.py` of vLLM's tests: servers that run already.

It is laid out in their folder under that name, and knows by its environment alone what to point at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import openai
import pytest

if TYPE_CHECKING:
    import anthropic

URL_VARIABLE = "RAYFLEET_SHIM_URL"
"""Where the server listens, without a path."""
MODELS_VARIABLE = "RAYFLEET_SHIM_MODELS"
"""Names of models that it has, with commas between them."""
CLIENT_TIMEOUT_S = 600.0
"""As in vLLM."""

VLLM_PATH = Path(__file__).parent.parent
ROCM_EXTRA_ARGS: list[str] = []


class RemoteOpenAIServer:
    """The server that runs already, whatever arguments a test would start one with.

    Args:
        model: which the test asks for; where the server has none of this name, the test is skipped.
        vllm_serve_args: ignored, but for names to serve the model by.
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
        """The server itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves it running."""

    def url_for(self, *parts: str) -> str:
        """Address of a path that is given in parts."""
        return "/".join((self.url_root, *(part.strip("/") for part in parts if part)))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client of it."""
        return openai.OpenAI(**self._client_options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The asynchronous one."""
        return openai.AsyncOpenAI(**self._client_options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic's client of it, which takes a second and a half to import."""
        import anthropic

        return anthropic.Anthropic(**self._client_options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """The asynchronous one."""
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
