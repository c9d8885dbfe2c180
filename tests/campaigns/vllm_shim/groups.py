"""Groups of vLLM's tests, the fleet that each runs against, and skipped tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FOLDERS = (
    "entrypoints/openai",
    "entrypoints/anthropic",
    "entrypoints/serve/tokenize",
    "entrypoints/serve/instrumentator",
    "entrypoints/tool_parsers",
    "tool_use",
)
"""Folders below a checkout's `tests` with tests of endpoints that rayfleet has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Files that run against one fleet."""

    name: str
    files: tuple[str, ...]
    models: tuple[str, ...]
    """Served model names of the demo model; the files use these names."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters; their outputs equal the demo model's."""
    thinks: bool = False
    """Whether the chat template opens a reasoning block, as Qwen3's does."""
    max_model_len: int = 2048
    """Maximum sequence length; most servers in vLLM's tests use 2,048."""
    endpoint: Mapping[str, Any] = field(default_factory=dict)
    """Options of EndpointConfig."""


_CHAT = "entrypoints/openai/chat_completion"
_COMPLETION = "entrypoints/openai/completion"
_RESPONSES = "entrypoints/openai/responses"

GROUPS = (
    Group(
        name="plain",
        files=(
            f"{_CHAT}/test_chat.py",
            f"{_CHAT}/test_chat_completion.py",
            f"{_CHAT}/test_chat_echo.py",
            f"{_CHAT}/test_chat_logit_bias_validation.py",
            f"{_CHAT}/test_completion_with_function_calling.py",
            f"{_CHAT}/test_enable_force_include_usage.py",
            f"{_CHAT}/test_extra_content_fields.py",
            f"{_CHAT}/test_logprob_token_ids.py",
            f"{_CHAT}/test_thinking_token_budget.py",
            f"{_COMPLETION}/test_completion.py",
            f"{_COMPLETION}/test_prompt_validation.py",
            f"{_COMPLETION}/test_token_in_token_out.py",
            f"{_RESPONSES}/test_basic.py",
            f"{_RESPONSES}/test_function_call.py",
            f"{_RESPONSES}/test_namespace_tool_separator.py",
            f"{_RESPONSES}/test_simple.py",
            f"{_RESPONSES}/test_stateful.py",
            f"{_RESPONSES}/test_structured_output.py",
            "entrypoints/openai/test_return_token_ids.py",
            "entrypoints/openai/test_return_tokens_as_ids.py",
            "entrypoints/tool_parsers/test_granite4_tool_parser.py",
            "entrypoints/tool_parsers/test_hermes_tool_parser.py",
            "tool_use/test_chat_completions.py",
            "tool_use/test_parallel_tool_calls.py",
            "tool_use/test_tool_calls.py",
        ),
        models=(
            "HuggingFaceH4/zephyr-7b-beta",
            "NousResearch/Hermes-3-Llama-3.1-8B",
            "Qwen/Qwen2-1.5B-Instruct",
            "Qwen/Qwen2.5-1.5B-Instruct",
            "Qwen/Qwen3-0.6B",
            "Qwen/Qwen3-1.7B",
            "Qwen/Qwen3-8B",
            "google/translategemma-4b-it",
            "openai-community/gpt2",
        ),
        adapters=("zephyr-lora",),
    ),
    Group(
        name="adapters",
        files=("entrypoints/openai/models/test_models.py",),
        models=("Qwen/Qwen3-0.6B",),
        adapters=("qwen3-lora",),
    ),
    Group(
        name="long",
        files=(
            "entrypoints/anthropic/test_messages.py",
            "entrypoints/openai/test_chunked_prompt.py",
            "entrypoints/serve/tokenize/test_tokenization.py",
        ),
        models=(
            "Qwen/Qwen3-0.6B",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "claude-3-7-sonnet-latest",
        ),
        max_model_len=8192,
    ),
    Group(
        name="longer",
        files=("entrypoints/serve/instrumentator/test_basic.py",),
        models=("Qwen/Qwen3-0.6B",),
        max_model_len=16384,
    ),
    Group(
        name="thinking",
        files=(f"{_CHAT}/test_include_reasoning.py",),
        models=("Qwen/Qwen3-0.6B",),
        thinks=True,
    ),
    Group(
        name="guarded",
        files=(f"{_CHAT}/test_root_path.py",),
        models=("Qwen/Qwen2-1.5B-Instruct",),
        endpoint={"root_path": "/llm", "api_keys": ("abc-123",)},
    ),
)
