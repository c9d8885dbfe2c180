"""Bodies of any size for each route of the gateway, with shapes that once took quadratic time."""

from __future__ import annotations

import json
from collections.abc import Callable

Shape = Callable[[int], bytes]
"""Creates a body of approximately a given size."""


def filled(begin: str, item: str, end: str) -> Shape:
    """`item` repeated between `begin` and `end`, with `#` replaced by its index."""

    def shape(size: int) -> bytes:
        items, left, number = list[str](), size - len(begin) - len(end), 0
        if "#" not in item:
            items, left = [item] * -(-left // (len(item) + 1)), 0
        while left > 0:
            items.append(item.replace("#", str(number)))
            left -= len(items[-1]) + 1
            number += 1
        return f"{begin}{','.join(items)}{end}".encode()

    return shape


def long_text(begin: str, text: str, end: str) -> Shape:
    """`text` repeated within a string, between `begin` and `end`."""
    return lambda size: f"{begin}{text * (size // len(text))}{end}".encode()


def nested(begin: str, end: str) -> Shape:
    """Nested lists, between `begin` and `end`."""
    return lambda size: f"{begin}{'[' * (size // 2)}{']' * (size // 2)}{end}".encode()


_USER = '{"role":"user","content":"a"}'
_CALL = '{"id":"c#","type":"function","function":{"name":"f","arguments":"{}"}}'
_RESULT = '{"role":"tool","tool_call_id":"c0","content":"a"}'
_TOOL = '{"type":"function","function":{"name":"f#","parameters":{}}}'
_HI = f'"messages":[{_USER}]'

ANY: dict[str, Shape] = {
    "unknown fields": filled('{"x":1,', '"f#":1', "}"),
    "null fields": filled("{", '"f#":null', "}"),
    "nesting": nested('{"metadata":', "}"),
    "a list": filled("[", "1", "]"),
    "a long number": long_text('{"seed":', "9", "}"),
    "a long name": long_text('{"', "messages", '":1}'),
    "backslashes": long_text('{"metadata":{"a":"', "\\\\", '"}}'),
    "cut off": long_text('{"user":"', "a", ""),
}
"""Shapes for any route."""

_SAMPLING: dict[str, Shape] = {
    "stop strings": filled(f'{{{_HI},"prompt":"a","stop":[', '"s#"', "]}"),
    "bad words": filled(f'{{{_HI},"prompt":"a","bad_words":[', '"s#"', "]}"),
    "logit bias": filled(f'{{{_HI},"prompt":"a","logit_bias":{{', '"#":1', "}}"),
    "allowed tokens": filled(f'{{{_HI},"prompt":"a","allowed_token_ids":[', "1", "]}"),
    "schema": filled(
        f'{{{_HI},"response_format":{{"type":"json_schema","json_schema":{{"name":"a",'
        '"schema":{"type":"object","properties":{',
        '"p#":{"type":"string"}',
        "}}}}}",
    ),
}

_CHAT: dict[str, Shape] = {
    "messages": filled('{"messages":[', _USER, "]}"),
    "messages of many roles": filled(
        '{"messages":[', f'{{"role":"system","content":"a"}},{_USER}', f",{_USER}]}}"
    ),
    "developers": filled('{"messages":[', '{"role":"developer","content":"a"}', f",{_USER}]}}"),
    "a long message": long_text('{"messages":[{"role":"user","content":"', "ab c ", '"}]}'),
    "a long word": long_text('{"messages":[{"role":"user","content":"', "a", '"}]}'),
    "parts": filled(
        '{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
    ),
    "calls": filled(
        f'{{"messages":[{_USER},{{"role":"assistant","content":"","tool_calls":[',
        _CALL,
        f"]}},{_RESULT}]}}",
    ),
    "results of one call": filled(
        f'{{"messages":[{_USER},{{"role":"assistant","content":"","tool_calls":['
        f"{_CALL.replace('#', '0')}]}},",
        _RESULT,
        "]}",
    ),
    "results in reverse": lambda size: json.dumps(
        {
            "messages": [
                json.loads(_USER),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [json.loads(_CALL.replace("#", str(i))) for i in _half(size)],
                },
                *(
                    {"role": "tool", "tool_call_id": f"c{i}", "content": "a"}
                    for i in reversed(_half(size))
                ),
            ]
        }
    ).encode(),
    "calls and results": filled(
        f'{{"messages":[{_USER},',
        f'{{"role":"assistant","content":"","tool_calls":[{_CALL}]}},'
        '{"role":"tool","tool_call_id":"c#","content":"a"}',
        "]}",
    ),
    "tools": filled(f'{{{_HI},"tools":[', _TOOL, "]}"),
    "required tools": filled(f'{{{_HI},"tool_choice":"required","tools":[', _TOOL, "]}"),
    "allowed tools": filled(
        f'{{{_HI},"tools":[{_TOOL}],"tool_choice":{{"type":"allowed_tools","allowed_tools":'
        '{"mode":"auto","tools":[',
        '{"type":"function","function":{"name":"f#"}}',
        "]}}}",
    ),
    "template arguments": filled(f'{{{_HI},"chat_template_kwargs":{{', '"a#":[]', "}}"),
    "a continued message": long_text(
        f'{{{_HI[:-1]},{{"role":"user","content":"',
        "a",
        '"},{"role":"assistant","content":"a</think>' + 40_000 * "a" + '"}],'
        '"continue_final_message":true}',
    ),
}

_BLOCKS = '"max_tokens":9,"messages":['
_ANTHROPIC: dict[str, Shape] = {
    "messages": filled(f"{{{_BLOCKS}", _USER, "]}"),
    "messages of some length": filled(
        f"{{{_BLOCKS}", f'{{"role":"user","content":"{500 * "a"}"}}', "]}"
    ),
    "assistants": filled(
        f"{{{_BLOCKS}{_USER},",
        '{"role":"assistant","content":[{"type":"tool_use","id":"c#","name":"f","input":{}}]}',
        f",{_USER}]}}",
    ),
    "blocks": filled(
        f'{{{_BLOCKS}{{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
    ),
    "results": filled(
        f'{{{_BLOCKS}{{"role":"user","content":[',
        '{"type":"tool_result","tool_use_id":"c"}',
        "]}]}",
    ),
    "system": filled(f'{{{_BLOCKS}{_USER}],"system":[', '{"type":"text","text":"a"}', "]}"),
    "tools": filled(f'{{{_BLOCKS}{_USER}],"tools":[', '{"name":"f#","input_schema":{}}', "]}"),
    "stop strings": filled(f'{{{_BLOCKS}{_USER}],"stop_sequences":[', '"s#"', "]}"),
}

_RESPONSES: dict[str, Shape] = {
    "messages": filled('{"input":[', _USER, "]}"),
    "truncated messages": filled('{"truncation":"auto","input":[', _USER, "]}"),
    "truncated systems": filled(
        '{"truncation":"auto","input":[', f'{{"role":"system","content":"a"}},{_USER}', "]}"
    ),
    "a truncated text": long_text('{"truncation":"auto","input":"', "ab c ", '"}'),
    "calls": filled(
        '{"input":[',
        '{"type":"function_call","call_id":"c#","name":"f","arguments":"{}"}',
        "]}",
    ),
    "results": filled(
        '{"input":[{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},',
        '{"type":"function_call_output","call_id":"c","output":"a"}',
        "]}",
    ),
    "reasoning": filled(
        '{"input":[', '{"type":"reasoning","summary":[{"type":"summary_text","text":"a"}]}', "]}"
    ),
    "tools": filled('{"input":"a","tools":[', '{"type":"function","name":"f#"}', "]}"),
    "included": filled('{"input":"a","include":[', '"message.output_text.logprobs"', "]}"),
}

_PROMPTS: dict[str, Shape] = {
    "a long prompt": long_text('{"prompt":"', "ab c ", '"}'),
    "token ids": filled('{"prompt":[', "1", "]}"),
    "texts": filled('{"max_tokens":1,"prompt":[', '"a"', "]}"),
    "lists of token ids": filled('{"max_tokens":1,"prompt":[', "[1]", "]}"),
    "echo": long_text('{"echo":true,"max_tokens":1,"prompt":"', "ab c ", '"}'),
}

_TOKENS: dict[str, Shape] = {
    name: shape for name, shape in _CHAT.items() if name not in ("required tools", "allowed tools")
}

_INPUTS: dict[str, Shape] = {
    "a long input": long_text('{"input":"', "ab c ", '"}'),
    "inputs": filled('{"input":[', '"a"', "]}"),
    "lists of input ids": filled('{"input":[', "[1]", "]}"),
}
_DOCUMENTS: dict[str, Shape] = {
    "documents": filled('{"query":"a","documents":[', '"a"', "]}"),
    "a long document": long_text('{"query":"a","documents":["', "ab c ", '"]}'),
}

ROUTES: dict[str, dict[str, Shape]] = {
    "/v1/chat/completions": {**_CHAT, **_SAMPLING},
    "/v1/completions": {**_PROMPTS, **_SAMPLING},
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/responses": _RESPONSES,
    "/v1/embeddings": _INPUTS,
    "/pooling": {},
    "/classify": {},
    "/score": {"pairs": filled('{"text_1":"a","text_2":[', '"a"', "]}")},
    "/v1/score": {},
    "/rerank": _DOCUMENTS,
    "/v1/rerank": {},
    "/v2/embed": {"texts": filled('{"texts":[', '"a"', "]}")},
    "/v2/rerank": {},
    "/v1/decisions": {
        "questions": filled(
            '{"input":"a","questions":[', '{"type":"predicate","instructions":"a"}', "]}"
        ),
        "choices": filled(
            '{"input":"a","questions":[{"type":"choice","instructions":"a","choices":[',
            '{"value":"c#"}',
            "]}]}",
        ),
        "a long state": long_text(
            '{"questions":[{"type":"predicate","instructions":"a"}],"input":"', "ab c ", '"}'
        ),
    },
    "/v1/systemone": {
        "named questions": filled('{"state":"a","questions":{', '"q#":{"type":"noul"}', "}}"),
        "a long state as JSON": filled(
            '{"questions":{"q":{"type":"score","criteria":["a","b"]}},"state":[', '"a"', "]}"
        ),
    },
    "/tokenize": {**_TOKENS, "a long prompt": _PROMPTS["a long prompt"]},
    "/detokenize": {"token ids": filled('{"tokens":[', "1", "]}")},
    "/admin/admission": {"names": filled("{", '"prefill_max_batch_size#":1', "}")},
    "/v1/load_lora_adapter": {},
    "/v1/unload_lora_adapter": {},
}
"""Shapes of bodies by route, in addition to ANY."""
POOLING = ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank")
"""Routes of pooling models."""
NO_BODY = ("/v1/responses/{response_id}/cancel", "/ping")
"""POST routes that do not read a body."""


def _half(size: int) -> range:
    return range(size // 140)
