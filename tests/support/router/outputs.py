"""Outputs of models of each family: reasoning, content and calls, as text and parsed."""

from __future__ import annotations

from typing import Any

BERN = ("get_weather", {"city": "Bern"})
ZURICH = ("get_weather", {"city": 'Zü"r\\ich\n', "days": 3})
NOW: tuple[str, dict[str, Any]] = ("now", {})
BAR, GAP = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace('_', GAP)}{BAR}>"


CALL, CALL_END, SEP = (deepseek(n) for n in ("tool_call_begin", "tool_call_end", "tool_sep"))
CALLS, CALLS_END = deepseek("tool_calls_begin"), deepseek("tool_calls_end")

Expected = tuple[str, str, list[tuple[str, dict[str, Any] | str]]]
"""Expected reasoning, content and calls; truncated arguments are text."""
TABLE: list[tuple[str, str, Expected]] = [
    ("hermes", "plain text, 1 < 2 <too", ("", "plain text, 1 < 2 <too", [])),
    ("hermes", "  kept \n", ("", "  kept \n", [])),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        ("", "", [BERN]),
    ),
    (
        "hermes",
        (
            '<think>\nhm </tool\n</think>\n\nLet me see.\n<tool_call>{"name": "now"}</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Bern\\"}"}'
            "</tool_call>\n"
        ),
        ("hm </tool", "Let me see.", [NOW, BERN]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\n\tb"}}</tool_call>',
        ("", "", [("get_weather", {"city": "a\n\tb"})]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>',
        ("", '\\ud800"}}</tool_call>', [("now", '{"a":"')]),
    ),
    ("hermes", '<think>so <tool_call>{"name":"now"}</tool_call>', ("so", "", [NOW])),
    ("hermes", "<think>never ends", ("never ends", "", [])),
    ("hermes", "<think>a</think></think>b</think>", ("a", "b</think>", [])),
    ("hermes", "b <think>c</think>", ("", "b <think>c</think>", [])),
    (
        "hermes",
        'Hi <tool_call>{"name": 5}</tool_call> there',
        ("", 'Hi <tool_call>{"name": 5}</tool_call> there', []),
    ),
    ("hermes", "Hi <tool_call>{", ("", "Hi <tool_call>{", [])),
    ("hermes", '<tool_call>{"name": "now"', ("", '<tool_call>{"name": "now"', [])),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n', ("", "", [NOW])),
    (
        "qwen3_coder",
        (
            'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZü"r\\ich\n\n'
            "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        ("", "I look.", [ZURICH, NOW]),
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=city>Bern<parameter=days>x</function></tool_call>",
        ("", "", [("get_weather", {"city": "Bern", "days": "x"})]),
    ),
    (
        "qwen3_coder",
        (
            "<tool_call><function=get_weather><parameter=exact>True</parameter>"
            "<parameter=when>null</parameter></function></tool_call>"
        ),
        ("", "", [("get_weather", {"exact": True, "when": None})]),
    ),
    (
        "glm45",
        (
            "<think>x</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern"
            "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
            "<tool_call>now</tool_call>"
        ),
        ("x", "", [("get_weather", {"city": "Bern", "days": 2}), NOW]),
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Bern"}}; {"name": "now"}',
        ("", "", [BERN, NOW]),
    ),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', ("", "", [NOW])),
    ("llama3_json", '\n{"answer": [1, 2]} ', ("", '\n{"answer": [1, 2]} ', [])),
    ("llama3_json", '{"name": "unknown"}', ("", '{"name": "unknown"}', [])),
    ("llama3_json", 'It is {"name": "now"}', ("", 'It is {"name": "now"}', [])),
    ("pythonic", '[get_weather(city="Bern"), now()]', ("", "", [BERN, NOW])),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", ("", "", [NOW])),
    ("pythonic", "[get_weather(city=open('x'))]", ("", "[get_weather(city=open('x'))]", [])),
    ("pythonic", "[1, 2, 3] is a list", ("", "[1, 2, 3] is a list", [])),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "now"}]',
        ("", "", [BERN, NOW]),
    ),
    (
        "mistral",
        'Well. [TOOL_CALLS]get_weather{"city": "Bern"}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}',
        ("", "Well.", [BERN, NOW]),
    ),
    ("mistral", "[TOOL_CALLS]what", ("", "[TOOL_CALLS]what", [])),
    (
        "deepseek_v31",
        (
            f'<think>x</think>{CALLS}{CALL}get_weather{SEP}{{"city": "Bern"}}{CALL_END}'
            f"{CALL}now{SEP}{{}}{CALL_END}{CALLS_END}"
        ),
        ("x", "", [BERN, NOW]),
    ),
    (
        "deepseek_v31",
        f'ok{CALLS}{CALL}function{SEP}get_weather\n```json\n{{"city": "Bern"}}\n```{CALL_END}',
        ("", "ok", [BERN]),
    ),
    ("json", '[{"name": "now", "parameters": {}}]', ("", "", [NOW])),
    ("json", '[{"name": "now", "parameters": {}}, {"name": "get_w', ("", "", [NOW])),
    ("llama3_json", '{"name": "now"}; {"name": "get_', ("", "", [NOW])),
    ("mistral", '[TOOL_CALLS][{"name": "now"}, {', ("", "", [NOW])),
]

DSML = f"{BAR}DSML{BAR}"
PARAMETER = f"{DSML}parameter"
TABLE += [
    (
        "seed_oss",
        (
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city> Bern\n</parameter>\n"
            "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
            "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
        ),
        ("", "", [("get_weather", {"city": " Bern\n", "days": 3}), NOW]),
    ),
    (
        "seed_oss",
        (
            "<seed:tool_call><function=get_weather><parameter=tags>['a', None, {\"b\": true}]"
            "</parameter><parameter=days>[x]</parameter></function></seed:tool_call>"
        ),
        ("", "", [("get_weather", {"tags": ["a", None, {"b": True}], "days": "[x]"})]),
    ),
    (
        "longcat",
        (
            'ok<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>'
            '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}'
            "</longcat_tool_call>"
        ),
        ("", "ok", [NOW, BERN]),
    ),
    (
        "longcat_xml",
        (
            "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
            "<longcat_arg_value>Bern</longcat_arg_value>\n</longcat_tool_call>"
            "<longcat_tool_call>now\n</longcat_tool_call>"
        ),
        ("", "", [BERN, NOW]),
    ),
    (
        "minimax_m2",
        (
            "<think>\nx\n</think>\n\nI look.\n<minimax:tool_call>\n"
            '<invoke name="get_weather">\n<parameter name="city">Zü"r\\ich\n</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
            "</minimax:tool_call>"
        ),
        ("x", "I look.", [ZURICH, NOW]),
    ),
    ("minimax_m2", "<minimax:tool_call>what", ("", "<minimax:tool_call>what", [])),
    (
        "deepseek_v32",
        (
            f'ok\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
            f'<{PARAMETER} name="city" string="true">12</{PARAMETER}>\n'
            f'<{PARAMETER} name="days" string="false">3</{PARAMETER}>\n'
            f'<{PARAMETER} name="when" string="true">null</{PARAMETER}>\n</{DSML}invoke>\n'
            f'<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>'
        ),
        ("", "ok", [("get_weather", {"city": "12", "days": 3, "when": "null"}), NOW]),
    ),
    (
        "deepseek_v32",
        (
            f'<{DSML}tool_calls><{DSML}invoke name="get_weather"><{PARAMETER} name="other" '
            f'string="false">{{"a": [1]}}</{PARAMETER}></{DSML}invoke></{DSML}tool_calls>'
        ),
        ("", "", [("get_weather", {"other": {"a": [1]}})]),
    ),
    (
        "kimi_k2",
        (
            "<think>x</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>"
            'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|>'
            "<|tool_call_begin|>now:11<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        ("x", "I look.", [BERN, NOW]),
    ),
    (
        "gemma4",
        (
            '<|tool_call>call:get_weather{city:<|"|>Zü"r\\ich\n<|"|>,days:3}<tool_call|>'
            "<|tool_call>call:now{}<tool_call|>"
        ),
        ("", "", [ZURICH, NOW]),
    ),
    (
        "gemma4",
        (
            '<|tool_call>call:now{a:[1.5, true,{b: null , <|"|>c<|"|>:<|"|><|"|>}],'
            "d:New York}<tool_call|>"
        ),
        ("", "", [("now", {"a": [1.5, True, {"b": None, "c": ""}], "d": "New York"})]),
    ),
    (
        "gemma4",
        "<|tool_call>call:now{a:1,}<tool_call|> b",
        ("", "}<tool_call|> b", [("now", '{"a":1,')]),
    ),
    (
        "granite",
        (
            '<think>x</think>ok <|tool_call|>[{"name": "get_weather", "arguments": {"city": '
            '"Bern"}}, {"name": "now", "arguments": {}}]'
        ),
        ("x", "ok", [BERN, NOW]),
    ),
    ("granite", "<|tool_call|>[]", ("", "<|tool_call|>[]", [])),
    (
        "command",
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
            '"parameters": {"city": "Bern"}},\n    {"tool_call_id": "1", "tool_name": "now", '
            '"parameters": {}}\n]<|END_ACTION|>'
        ),
        ("", "", [BERN, NOW]),
    ),
    (
        "command",
        '<|START_ACTION|>[{"tool_name": "now"}]<|END_ACTION|>',
        ("", "", [NOW]),
    ),
    (
        "hunyuan",
        (
            '<think>x</think><tool_calls>[{"name": "get_weather", "arguments": {"city": "Bern"}},'
            '{"name": "now", "arguments": {}}]</tool_calls>'
        ),
        ("x", "", [BERN, NOW]),
    ),
    (
        "hy_v3",
        (
            "ok<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
            "<arg_key:opensource>city</arg_key:opensource>\n"
            "<arg_value:opensource>Bern</arg_value:opensource>\n</tool_call:opensource>\n"
            "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
            "</tool_calls:opensource>"
        ),
        ("", "ok", [BERN, NOW]),
    ),
    (
        "hy_v3_preview",
        (
            "<think>x</think><tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>"
            "\n<arg_value>Bern</arg_value>\n</tool_call>\n</tool_calls>"
        ),
        ("x", "", [BERN]),
    ),
    (
        "internlm",
        (
            'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": '
            '"Bern"}}<|action_end|>'
        ),
        ("", "I look.", [BERN]),
    ),
    (
        "internlm",
        "<|action_start|><|interpreter|>\n1<|action_end|>",
        ("", "<|action_start|><|interpreter|>\n1<|action_end|>", []),
    ),
    (
        "phi4_mini",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Bern"}}]<|/tool_call|>',
        ("", "", [BERN]),
    ),
    (
        "phi4_mini",
        'functools[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        ("", "", [NOW, NOW]),
    ),
    ("phi4_mini", "use functools[x]", ("", "use functools[x]", [])),
    (
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Bern"}}]</TOOLCALL>',
        ("", "", [BERN]),
    ),
    (
        "apertus",
        'ok<|tools_prefix|>[{"get_weather": {"city": "Bern"}}, {"now": {}}]<|tools_suffix|>',
        ("", "ok", [BERN, NOW]),
    ),
    (
        "apertus",
        "<|tools_prefix|>[5]<|tools_suffix|>",
        ("", "<|tools_prefix|>[5]<|tools_suffix|>", []),
    ),
    (
        "solar_open",
        (
            "ok<|begin|>assistant<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>get_weather"
            '<|tool_call:args|>{"city": "Bern"}<|tool_call:end|><|tool_call:begin|>1'
            "<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>"
        ),
        ("", "ok", [BERN, NOW]),
    ),
    (
        "pythonic",
        "<|tool_call_start|>[now(a=null)]<|tool_call_end|>Then.",
        ("", "Then.", [("now", {"a": None})]),
    ),
    ("glm4", '<think>x</think>\nget_weather\n{"city": "Bern"}', ("x", "", [BERN])),
    ("glm4", 'get_money\n{"city": "Bern"}', ("", 'get_money\n{"city": "Bern"}', [])),
    ("glm4", "now\nor never", ("", "now\nor never", [])),
    (
        "olmo3",
        (
            "I look.\n<function_calls>\nget_weather(city='Bern')\nnow(a=[true], b={'c': null})\n"
            "</function_calls>"
        ),
        ("", "I look.", [BERN, ("now", {"a": [True], "b": {"c": None}})]),
    ),
    (
        "olmo3",
        "<function_calls>x = 1</function_calls>",
        ("", "<function_calls>x = 1</function_calls>", []),
    ),
]

CITY = "Zürich, the city"
STREAMED = {
    **{
        name: f'{begin}{{"city": "{CITY}"}}'
        for name, begin in {
            "glm4": "get_weather\n",
            "kimi_k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>",
            "granite": '<|tool_call|>[{"name": "get_weather", "arguments": ',
            "command": '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": ',
            "hunyuan": '<tool_calls>[{"name": "get_weather", "arguments": ',
            "internlm": '<|action_start|><|plugin|>{"name": "get_weather", "parameters": ',
            "phi4_mini": 'functools[{"name": "get_weather", "arguments": ',
            "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": ',
            "apertus": '<|tools_prefix|>[{"get_weather": ',
            "solar_open": "<|tool_call:begin|>0<|tool_call:name|>get_weather<|tool_call:args|>",
            "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ',
            "llama3_json": '{"name": "get_weather", "parameters": ',
            "mistral": "[TOOL_CALLS]get_weather[ARGS]",
            "deepseek_v31": f"{CALLS}{CALL}get_weather{SEP}",
            "json": '[{"name": "now", "parameters": {}}, {"name": "get_weather", "parameters": ',
        }.items()
    },
    "longcat": f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{CITY}"}}}}',
    "longcat_xml": f"<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>"
    f"<longcat_arg_value>{CITY}</longcat_arg_value>",
    "hy_v3": "<tool_call:opensource>get_weather<tool_sep:opensource><arg_key:opensource>city"
    f"</arg_key:opensource><arg_value:opensource>{CITY}</arg_value:opensource>",
    "hy_v3_preview": "<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>"
    f"<arg_value>{CITY}</arg_value>",
    "seed_oss": f"<seed:tool_call>\n<function=get_weather>\n<parameter=city>{CITY}</parameter>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    f'<parameter name="city">{CITY}</parameter>',
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
    f'<{PARAMETER} name="city" string="true">{CITY}</{PARAMETER}>',
    "gemma4": f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>}}',
    "qwen3_coder": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>",
    "glm45": f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>",
}

FORCED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 3}}\n'
    "</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bern</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Bern", "days": 3}}',
    "deepseek_v31": f'{CALLS}{CALL}get_weather{SEP}{{"city": "Bern", "days": 3}}{CALL_END}'
    f"{CALLS_END}",
    "json": '[{"name": "get_weather", "parameters": {"city": "Bern", "days": 3}}]',
    "longcat": '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", '
    '"days": 3}}\n'
    "</longcat_tool_call>",
    "hunyuan": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Bern", "days": 3}}]'
    "</tool_calls>",
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Bern", "days": 3}}]'
    "</TOOLCALL>",
}
