"""Tool loops with several client libraries: send a question, run the calls, return the results.

Arguments of each loop are the endpoint's URL, a model name, a question, and whether a grammar
forces the first response to be a tool call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests.campaigns.agents.world import (
    FUNCTIONS,
    MAX_TURNS,
    Run,
    description,
    made,
    parsed,
    schema,
)

if TYPE_CHECKING:
    from openai import OpenAI

KEY = "nobody-checks-it"
TIMEOUT_S = 600.0
MAX_TOKENS = 160
Loop = Callable[[str, str, str, bool], Run]


def openai_chat(base_url: str, model: str, question: str, is_forced: bool) -> Run:
    """Runs non-streaming chat completions."""
    return _chat(base_url, model, question, is_forced, streams=False)


def openai_stream(base_url: str, model: str, question: str, is_forced: bool) -> Run:
    """Runs streaming chat completions, assembled by the client library's accumulator."""
    return _chat(base_url, model, question, is_forced, streams=True)


def _chat(base_url: str, model: str, question: str, is_forced: bool, *, streams: bool) -> Run:
    run = Run()
    messages: list[Any] = [{"role": "user", "content": question}]
    with _openai(base_url) as client:
        for turn in range(MAX_TURNS):
            fields: dict[str, Any] = {
                "model": model,
                "messages": messages,
                "tools": [{"type": "function", "function": tool} for tool in _functions()],
                "tool_choice": "required" if is_forced and not turn else "auto",
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            choice = _streamed(client, fields) if streams else _whole(client, fields)
            calls = choice.message.tool_calls or []
            if choice.finish_reason == "length":
                break  # a truncated call is not run
            if (choice.finish_reason == "tool_calls") != bool(calls):
                run.faults.append(f"{choice.finish_reason} with {len(calls)} calls")
            messages.append(choice.message.model_dump(exclude={"parsed"}))
            if not calls:
                run.answer = choice.message.content or ""
                break
            for call in calls:
                arguments = parsed(run, call.function.arguments)
                result, _ = run.call(call.function.name, arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    _check_ids(run, [m["tool_call_id"] for m in messages if m["role"] == "tool"])
    return run


def _whole(client: OpenAI, fields: dict[str, Any]) -> Any:
    return client.chat.completions.create(**fields).choices[0]


def _streamed(client: OpenAI, fields: dict[str, Any]) -> Any:
    from openai import LengthFinishReasonError
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state: Any = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**fields, stream=True):
        state.handle_chunk(chunk)
    try:
        return state.get_final_completion().choices[0]
    except LengthFinishReasonError as error:  # the client library's name for max_tokens
        return error.completion.choices[0]


def openai_responses(base_url: str, model: str, question: str, is_forced: bool) -> Run:
    """Runs responses that the server stores, with `previous_response_id`."""
    run, ids = Run(), []
    given: Any = question
    previous: str | None = None
    with _openai(base_url) as client:
        for turn in range(MAX_TURNS):
            fields: dict[str, Any] = {
                "model": model,
                "input": given,
                "tools": [{"type": "function", **tool} for tool in _functions()],
                "tool_choice": "required" if is_forced and not turn else "auto",
                "max_output_tokens": MAX_TOKENS,
                "temperature": 0,
                **({} if previous is None else {"previous_response_id": previous}),
            }
            response: Any = client.responses.create(**fields)
            if response.previous_response_id != previous:
                run.faults.append(f"{response.previous_response_id} instead of {previous}")
            previous = response.id
            if response.status == "incomplete":
                break
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                run.answer = response.output_text
                break
            given = []
            for call in calls:
                result, _ = run.call(call.name, parsed(run, call.arguments))
                output = {"type": "function_call_output", "call_id": call.call_id}
                given.append({**output, "output": result})
                ids.append(call.call_id)
    _check_ids(run, ids)
    return run


def anthropic_messages(base_url: str, model: str, question: str, is_forced: bool) -> Run:
    """Runs Anthropic tool use; failed calls are returned with `is_error`."""
    import anthropic  # takes 1.5 s of CPU time, which test collection should not pay for

    run, ids = Run(), []
    messages: list[Any] = [{"role": "user", "content": question}]
    tools = [
        {"name": name, "description": description(name), "input_schema": schema(name)}
        for name in FUNCTIONS
    ]
    http_client = anthropic.DefaultHttpxClient(verify=False)  # as with OpenAI's client
    options: dict[str, Any] = {"max_retries": 0, "timeout": TIMEOUT_S}
    with anthropic.Anthropic(
        base_url=base_url, api_key=KEY, http_client=http_client, **options
    ) as client:
        for turn in range(MAX_TURNS):
            fields: dict[str, Any] = {
                "model": model,
                "messages": messages,
                "tools": tools,
                "tool_choice": {"type": "any" if is_forced and not turn else "auto"},
                "max_tokens": MAX_TOKENS,
                "extra_body": {"temperature": 0},
            }
            message: Any = client.messages.create(**fields)
            calls = [block for block in message.content if block.type == "tool_use"]
            if message.stop_reason == "max_tokens":
                break
            if (message.stop_reason == "tool_use") != bool(calls):
                run.faults.append(f"{message.stop_reason} with {len(calls)} calls")
            if not calls:
                run.answer = "".join(b.text for b in message.content if b.type == "text")
                break
            results: list[dict[str, Any]] = []
            for call in calls:
                result, has_failed = run.call(call.name, call.input)
                ids.append(call.id)
                answered = {"type": "tool_result", "tool_use_id": call.id, "content": result}
                results.append({**answered, "is_error": has_failed})
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": results})
    _check_ids(run, ids)
    return run


def langchain_agent(base_url: str, model: str, question: str, is_forced: bool) -> Run:
    """Runs LangChain's agent, with a middleware that forces the first call."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError

    def force(request: Any, handler: Callable[[Any], Any]) -> Any:
        is_first = is_forced and len(request.messages) == 1
        return handler(request.override(tool_choice="required") if is_first else request)

    tools = [
        StructuredTool.from_function(_told(name), name=name, description=description(name))
        for name in FUNCTIONS
    ]
    chat = ChatOpenAI(
        model=model,
        base_url=f"{base_url}/v1",
        api_key=KEY,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        timeout=TIMEOUT_S,
    )
    agent = create_agent(chat, tools, middleware=[wrap_model_call(force)])
    run = Run()
    fields = {"messages": [{"role": "user", "content": question}]}
    try:
        # A turn is two steps of the graph: the model's and the tools'.
        found = agent.invoke(fields, {"recursion_limit": 2 * MAX_TURNS})["messages"]
    except GraphRecursionError:
        return run
    for message in found:
        if getattr(message, "response_metadata", {}).get("finish_reason") == "length":
            return run
        for bad in getattr(message, "invalid_tool_calls", None) or []:
            run.faults.append(f"LangChain cannot read a call: {bad}")
        calls = getattr(message, "tool_calls", None) or []
        run.calls.extend((call["name"], call["args"]) for call in calls)
    _check_ids(run, [message.tool_call_id for message in found if message.type == "tool"])
    run.answer = found[-1].content
    return run


def _told(name: str) -> Callable[..., str]:
    """Wraps a function under its own signature; an error becomes the tool's result."""

    @functools.wraps(FUNCTIONS[name])
    def call(**arguments: Any) -> str:
        return made(name, arguments)[0]

    return call


LOOPS: Mapping[str, Loop] = {
    "openai": openai_chat,
    "openai_streamed": openai_stream,
    "langchain": langchain_agent,
    "anthropic": anthropic_messages,
    "responses": openai_responses,
}


def _openai(base_url: str) -> OpenAI:
    from openai import DefaultHttpxClient, OpenAI

    # Without `verify` each client loads all certificates, which takes 30 ms.
    http_client = DefaultHttpxClient(verify=False)
    options: dict[str, Any] = {"max_retries": 0, "timeout": TIMEOUT_S}
    return OpenAI(base_url=f"{base_url}/v1", api_key=KEY, http_client=http_client, **options)


def _functions() -> list[dict[str, Any]]:
    return [
        {"name": name, "description": description(name), "parameters": schema(name)}
        for name in FUNCTIONS
    ]


def _check_ids(run: Run, ids: list[str]) -> None:
    if len(set(ids)) < len(ids) or not all(ids):
        run.faults.append(f"ids of calls are not unique: {ids}")
