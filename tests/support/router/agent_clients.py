"""Requests of coding agents: shapes recorded from their traffic and sources, with invented text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Erk"
DATA_URL = f"data:image/png;base64,{PNG}"
PATCH_GRAMMAR = 'start: "*** Begin Patch" LF /(.|\\n)+/ "*** End Patch" LF?\n%import common.LF\n'
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": CITY}
CHAT_TOOLS = [{"type": "function", "function": {**FUNCTION, "strict": False}}]
CHAT_HISTORY: Sequence[Mapping[str, Any]] = (
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}},
            {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "auto"}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [
            {"type": "text", "text": "sunny"},
            {"type": "image_url", "image_url": {"url": DATA_URL}},
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf"}},
        ],
    },
)


class Client(NamedTuple):
    """A client's request."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def _chat(headers: Mapping[str, str], **fields: Any) -> Client:
    body = {"model": "stub", "messages": CHAT_HISTORY, "tools": CHAT_TOOLS, **fields}
    return Client("/v1/chat/completions", headers, body)


CODEX_TOOLS: Sequence[Mapping[str, Any]] = (
    {"type": "function", **FUNCTION, "strict": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "x", "parameters": CITY},
    {
        "type": "namespace",
        "name": "mcp__docs__",
        "description": "Docs.",
        "tools": [{"type": "function", "name": "find", "parameters": CITY, "strict": False}],
    },
)
CODEX_HISTORY: Sequence[Mapping[str, Any]] = (
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions>"}],
    },
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": DATA_URL, "detail": "high"},
        ],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        "phase": "commentary",
    },
    {
        "type": "function_call",
        "name": "get_weather",
        "arguments": '{"city":"Be',
        "call_id": "call_1",
        "status": "incomplete",
    },
    {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": [
            {"type": "input_text", "text": "sunny"},
            {"type": "input_image", "image_url": DATA_URL},
        ],
    },
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_2",
        "name": "apply_patch",
        "input": '*** Begin Patch\n"a"\n*** End Patch',
    },
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
    {
        "type": "function_call",
        "name": "find",
        "namespace": "mcp__docs__",
        "arguments": "{}",
        "call_id": "call_3",
    },
    {"type": "function_call_output", "call_id": "call_3", "output": "none"},
    {
        "type": "local_shell_call",
        "call_id": "call_4",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "call_id": "call_4", "output": "a.py"},
    {
        "type": "tool_search_call",
        "call_id": "call_5",
        "execution": "client",
        "arguments": {"query": "x"},
        "status": "completed",
    },
    {
        "type": "tool_search_output",
        "call_id": "call_5",
        "execution": "client",
        "status": "completed",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
    },
    {"type": "compaction", "encrypted_content": "gAAAA"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
)
CLAUDE_HISTORY: Sequence[Mapping[str, Any]] = (
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
            },
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {
                "type": "server_tool_use",
                "id": "srvtoolu_1",
                "name": "web_search",
                "input": {"query": "x"},
            },
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": '{"ci'},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [
                    {"type": "text", "text": "sunny"},
                    {"type": "tool_reference", "tool_name": "get_weather"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": PNG},
                    },
                ],
            },
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "", "is_error": True},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
    },
)
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}

CLIENTS: Mapping[str, Client] = {
    "codex": Client(
        "/v1/responses",
        {"session-id": "s", "originator": "codex_cli_rs"},
        {
            "model": "stub",
            "instructions": "You are a coding agent.",
            "input": CODEX_HISTORY,
            "tools": CODEX_TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "auto",
            "prompt_cache_key": "s",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "i"},
        },
    ),
    "claude code": Client(
        "/v1/messages?beta=true",
        {
            "x-claude-code-session-id": "s",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
        },
        {
            "model": "stub",
            "max_tokens": 32000,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": CLAUDE_HISTORY,
            "tools": [
                {
                    "name": "get_weather",
                    "description": "The weather.",
                    "input_schema": CITY,
                    "eager_input_streaming": True,
                    "tomorrows_option": True,
                },
                SEARCH,
            ],
            "thinking": {"type": "adaptive", "display": "summarized", "tomorrows_option": 1},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
            "context_management": {
                "edits": [
                    {"type": "clear_thinking_20251015", "keep": "all"},
                    {
                        "type": "clear_tool_uses_20250919",
                        "trigger": {"type": "input_tokens", "value": 100000},
                    },
                    {"type": "compact_20260112"},
                ]
            },
            "tomorrows_field": {"x": 1},
        },
    ),
    "opencode": _chat(
        {"x-session-affinity": "s", "x-session-id": "s"},
        max_tokens=32000,
        tool_choice="auto",
        prompt_cache_key="s",
        enable_thinking=True,
        reasoning={"effort": "high"},
        usage={"include": True},
        verbosity="low",
    ),
    "qwen code": _chat(
        {"user-agent": "QwenCode/0.1"},
        max_tokens=8000,
        metadata={"sessionId": "s", "promptId": "p"},
        enable_thinking=True,
        temperature=0.2,
    ),
    "cline": _chat(
        {"user-agent": "Cline/3"},
        temperature=0,
        tool_choice="auto",
        parallel_tool_calls=False,
        thinking={"type": "enabled", "budget_tokens": 4096},
        reasoning={"enabled": True, "max_tokens": 4096, "exclude": False},
    ),
    "pi": _chat(
        {"session_id": "s", "x-client-request-id": "r"},
        store=False,
        max_completion_tokens=32000,
        reasoning_effort="high",
        prompt_cache_key="s",
        prompt_cache_retention="24h",
    ),
    "aider": Client(
        "/v1/chat/completions",
        {"x-title": "Aider"},
        {
            "model": "stub",
            "temperature": 0,
            "messages": [
                {"role": "system", "content": "Act as an expert."},
                {"role": "user", "content": "old"},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "go on"},
            ],
        },
    ),
}
