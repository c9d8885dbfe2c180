"""A gateway for a model with reasoning and tools, like Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.support.router.rig import Rig, build_checkpoint
from worker.protocol.messages import Submit
from worker.protocol.text.tokenizer import Tokenizer

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- 'Write <tool_call>{"name": .., "arguments": ..}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for document in documents or [] %}{{ 'doc: ' + document.text + '\n' }}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


def build_agent(folder: Path) -> None:
    """Creates the model's checkpoint."""
    build_checkpoint(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def agent_rig(folder: Path, tokenizer: Tokenizer) -> Rig:
    """A gateway for the model, not started, whose workers support chats of a given length."""
    rig = Rig(folder, tokenizer)
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(
            worker.info, max_model_len=4096, max_total_tokens=8192
        )
    return rig


def prompt_of(rig: Rig) -> str:
    """The last prompt that a worker received, as text."""
    ids = memoryview(rig.submits()[-1].prompt).cast("i").tolist()
    return rig.tokenizer.decode(ids, skip_special_tokens=False)


def play(rig: Rig, answer: str) -> None:
    """Scripts the model's answer; it follows reasoning if the prompt has opened a reasoning
    block."""

    def script(submit: Submit) -> list[int]:
        last = memoryview(submit.prompt).cast("i").tolist()[-32:]
        is_thinking = rig.tokenizer.decode(last).endswith("<think>\n")
        return [*rig.tokenizer.encode(f"hm\n</think>\n\n{answer}" if is_thinking else answer), 2]

    for worker in rig.workers:
        worker.script = script


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """JSON events of a stream."""
    lines = response.text.split("\n")
    data = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]
