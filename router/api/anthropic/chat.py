"""Converts bodies of Anthropic's Messages API to bodies of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import msgspec

from router.api.anthropic.protocol import (
    CLIENT_TOOLS,
    CONTEXT_EDITS,
    SERVER_TOOLS,
    CountTokensRequest,
    MessagesRequest,
    Tool,
)
from router.api.openai.fields import Ignored
from router.api.openai.messages import omitted
from router.api.openai.protocol import ChatRequest, Effort, ReasoningOptions, string_at, wrong_at
from router.api.openai.tools import function_tool, given_tool, unavailable_tools
from router.errors import bad_request

NAMES: Mapping[str, str] = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
}
"""Anthropic's field names by ChatRequest field, for fields whose names differ."""
BILLING = "x-anthropic-billing-header"
"""Prefix of a text block that Anthropic's clients put before the system prompt. The block is
dropped, since it differs per request and would defeat the prefix cache."""
BUDGETS: Sequence[tuple[int, Effort]] = ((1024, "low"), (2048, "medium"))
"""Maximum `budget_tokens` for each reasoning effort; larger budgets mean high effort."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: MessagesRequest, ignored: Ignored) -> ChatRequest:
    """Converts a body of /v1/messages. Raises ApiError (400) if it is malformed.

    Args:
        ignored: counts tools and context edits that are ignored.
    """
    return msgspec.structs.replace(
        prompt_of(body, ignored),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        priority=body.priority,
        slo=body.slo,
        cache_salt=body.cache_salt,
        user=body.metadata.user_id if body.metadata is not None else None,
    )


def prompt_of(body: CountTokensRequest, ignored: Ignored) -> ChatRequest:
    """The chat with only the fields that affect its prompt. Raises ApiError (400) if it is
    malformed."""
    _check_edits(body, ignored)
    tools, unavailable = _tools(body, ignored)
    turns = (_messages(index, message) for index, message in enumerate(body.messages))
    system = _system(body.system, unavailable_tools(unavailable))
    messages = _joined([*system, *chain.from_iterable(turns)])
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        raise bad_request(
            "messages must end with a user message, tool results, or assistant text for the model "
            "to continue",
            "messages",
        )
    output, thinking, choice = body.output_config, body.thinking, body.tool_choice
    form = None
    if output is not None and output.format is not None:
        form = {"type": "json_schema", "json_schema": {"schema": output.format.schema}}
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=tools,
        tool_choice=_choice(body, unavailable, has_tools=bool(tools)),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        # Clients send an effort for any model.
        reasoning=ReasoningOptions(effort=_effort(body)),
        include_reasoning=thinking is None or thinking.display != "omitted",
        response_format=form,
        thinking_token_budget=_budget(body),
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=continues,
    )


def _effort(body: CountTokensRequest) -> Effort | None:
    """The reasoning effort; None to use the chat template's default."""
    thinking, output = body.thinking, body.output_config
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if thinking is not None and thinking.type == "between_tools":
        raise bad_request("thinking.type between_tools is not supported: use adaptive", "thinking")
    is_enabled = thinking is not None and thinking.type == "enabled"
    budget = thinking.budget_tokens if thinking is not None else None
    if is_enabled and budget is None:
        raise bad_request("thinking.type enabled requires thinking.budget_tokens", "thinking")
    if output is not None and output.effort is not None:
        return output.effort
    if not is_enabled or budget is None:
        return None
    return next((effort for maximum, effort in BUDGETS if budget <= maximum), "high")


def _choice(
    body: CountTokensRequest, unavailable: Sequence[str], *, has_tools: bool
) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None or (unavailable and not has_tools):
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise bad_request("tool_choice.type tool requires tool_choice.name", "tool_choice")
    if choice.name in unavailable:
        return "auto"
    return {"type": "function", "function": {"name": choice.name}}


def _check_edits(body: CountTokensRequest, ignored: Ignored) -> None:
    """Counts context edits, which are not applied. Raises ApiError (400) for unknown edits, unless
    the client uses beta features."""
    for edit in () if body.context_management is None else body.context_management.edits:
        if not edit.type.startswith(CONTEXT_EDITS) and not ignored.is_beta:
            raise bad_request(
                f"context_management: unknown edit {edit.type[:64]!r}: omit it",
                "context_management",
            )
        ignored.count(f"context_management.{edit.type}")


def _tools(
    body: CountTokensRequest, ignored: Ignored
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The client's tools in the format of chat completions, and the names of tools that only
    Anthropic's servers run."""
    if body.tools is None:
        return None, []
    tools: list[dict[str, Any]] = []
    unavailable: list[str] = []
    for index, given in enumerate(body.tools):
        kind = given.get("type")
        if kind in (None, "custom"):
            tools.append(_tool(index, given, ignored))
            continue
        kind = str(kind)[:64]
        is_known = kind.startswith(SERVER_TOOLS)
        if not is_known and (kind.startswith(CLIENT_TOOLS) or not ignored.is_beta):
            raise bad_request(
                f"tools[{index}].type {kind} is not supported: send a tool with an input_schema "
                "(type custom)",
                "tools",
            )
        ignored.count(f"tools.{kind}")
        name = given.get("name", given.get("mcp_server_name"))
        unavailable.append(name if isinstance(name, str) else kind)
    return tools, unavailable


def _tool(index: int, given: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    tool = given_tool(index, given, Tool, ignored)
    description = tool.description
    if tool.input_examples:
        examples = msgspec.json.encode(tool.input_examples).decode()
        description = f"{description or ''}\nExamples of its input: {examples}".strip()
    return function_tool(tool.name, description, tool.input_schema, tool.strict)


def _system(system: str | Sequence[Mapping[str, Any]] | None, note: str) -> list[dict[str, Any]]:
    """A list with the system message; empty if there is none. A non-empty `note` is appended."""
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [_text("system", index, block) for index, block in enumerate(system or ())]
    if note:
        texts.append(note)
    content = "\n".join(text for text in texts if not text.startswith(BILLING))
    return [{"role": "system", "content": content}] if content else []


def _messages(index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts one Anthropic message to chat messages: one per tool result, and one for all other
    content."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        problem = f"messages[{index}].role must be user, assistant or system, got {role!r:.80}"
        raise bad_request(problem, "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong_at(f"messages[{index}].content", "must be a string or a list of blocks")
    where = f"messages[{index}].content"
    if role == "assistant":
        return [_assistant(where, content)]
    results = [
        _result(f"{where}[{place}]", block)
        for place, block in enumerate(content)
        if _kind(block) == "tool_result" and role == "user"
    ]
    texts = [
        _text(where, place, block)
        for place, block in enumerate(content)
        if _kind(block) != "tool_result" or role != "user"
    ]
    rest = [{"role": role, "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *rest]


def _assistant(where: str, content: Sequence[Any]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(content):
        kind = _kind(block)
        if kind == "tool_use":
            calls.append(_call(f"{where}[{place}]", block))
        elif kind == "thinking":
            thoughts.append(string_at(f"{where}[{place}].thinking", block.get("thinking")))
        elif kind != "redacted_thinking":  # encrypted by another server
            texts.append(_text(where, place, block))
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        made["reasoning"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name = string_at(f"{where}.name", block.get("name"))
    call_id = string_at(f"{where}.id", block.get("id"))
    # Clients replay a call that max_tokens has cut off with the input that they could read.
    function = {"name": name, "arguments": block.get("input")}
    return {"id": call_id, "type": "function", "function": function}


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id = string_at(f"{where}.tool_use_id", block.get("tool_use_id"))
    content = block.get("content")
    if isinstance(content, list):
        parts = (_text(f"{where}.content", place, part) for place, part in enumerate(content))
        text = "\n".join(parts)
    else:
        text = "" if content is None else string_at(f"{where}.content", content)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _text(where: str, place: int, block: Any) -> str:
    """The text of a block, or a note if it has none. Raises ApiError (400) if it is malformed."""
    kind, where = _kind(block), f"{where}[{place}]"
    if not isinstance(kind, str):
        raise wrong_at(f"{where}.type", "must be a string")
    if kind == "text":
        return string_at(f"{where}.text", block.get("text"))
    if kind in ("tool_use", "tool_result"):
        raise wrong_at(f"{where}.type", f"{kind} is not supported in messages of this role")
    if kind == "document" and isinstance(source := block.get("source"), dict):
        found = _document(where, block, source)
        return omitted(kind) if found is None else found
    if kind == "search_result" and isinstance(content := block.get("content"), list):
        texts = [_text(f"{where}.content", i, part) for i, part in enumerate(content)]
        parts = (block.get("title"), block.get("source"), *texts)
        return "\n".join(part for part in parts if isinstance(part, str))
    if kind == "compaction" and isinstance(summary := block.get("content"), str):
        return summary
    return omitted(kind)


def _document(where: str, block: Mapping[str, Any], source: Mapping[str, Any]) -> str | None:
    """The text of a document, preceded by its title and context; None for PDFs and files."""
    data = source.get("data") if source.get("type") == "text" else None
    if source.get("type") == "content":
        content = source.get("content")
        if isinstance(content, list):
            where = f"{where}.source.content"
            content = "\n".join(_text(where, i, part) for i, part in enumerate(content))
        data = content
    if not isinstance(data, str):
        return None
    parts = (block.get("title"), block.get("context"), data)
    return "\n".join(part for part in parts if isinstance(part, str))


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins consecutive messages of the same role (user or assistant).

    Takes time linear in the total length of the messages.
    """
    joined: list[dict[str, Any]] = []
    for role, run in groupby(messages, key=itemgetter("role")):
        others = list(run)
        if role in ("tool", "system") or len(others) == 1:
            joined += others
            continue
        whole = {"role": role, "content": "\n".join(m["content"] for m in others if m["content"])}
        thoughts = [m["reasoning"] for m in others if "reasoning" in m]
        if thoughts:
            whole["reasoning"] = "\n".join(thoughts)
        calls = [call for m in others for call in m.get("tool_calls", ())]
        if calls:
            whole["tool_calls"] = calls
        joined.append(whole)
    return joined


def _budget(body: CountTokensRequest) -> int | None:
    """Maximum number of reasoning tokens; None if there is no maximum."""
    thinking = body.thinking
    return None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens
