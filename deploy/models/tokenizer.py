"""Byte-level BPE with single-token digits, trained on the corpus and saved in Hugging Face
format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deploy.models.corpus import Conversation

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
PADDING: Final = "<|pad|>"
MASK: Final = "<|MASK|>"
"""Mask token for undecided positions; only block-diffusion tokenizers have it."""
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END, PADDING)
MARKERS: Final = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Added tokens that are not special, as in Qwen3: they are part of the text."""
THOUGHT_END: Final = "\n</think>\n\n"
"""Text between the reasoning and the answer."""

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
{%- if message.content is string %}
{%- set content = message.content %}
{%- else %}
{%- set content = message.content | map(attribute='text') | join('') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TOOL_TEMPLATE: Final = """\
{%- macro text(content) %}
{%- if content is string %}
{{- content }}
{%- elif content %}
{{- content | map(attribute='text') | join('') }}
{%- endif %}
{%- endmacro %}
{%- macro example(schema) %}
{%- set type = schema.type if schema.type is string else 'string' %}
{%- set examples = {'boolean': 'false', 'array': '[]', 'object': '{}'} %}
{{- '0' if type in ('integer', 'number') else examples.get(type, '""') }}
{%- endmacro %}
{%- macro arguments(schema) %}
{{- '{' }}
{%- for key, value in (schema.properties or {}).items() %}
{{- ('' if loop.first else ', ') + '"' + key }}
{{- '": ' if key in (schema.required or []) else '"?: ' }}
{{- example(value) }}
{%- endfor %}
{{- '}' }}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- text(messages[0].content) + '\\n\\n' }}
{%- endif %}
{{- '<tools>\\n' }}
{%- for tool in tools %}
{%- set function = tool.function or tool %}
{{- function.name + ' ' + arguments(function.parameters or {}) + ': ' }}
{{- (function.description or '').strip().split('\\n')[0] + '\\n' }}
{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if tools and loop.first and message.role == 'system' %}
{%- elif message.role == 'tool' %}
{{- '\\n' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user\\n' }}
{{- '<tool_response>\\n' + text(message.content) + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{%- set said = text(message.content) %}
{%- if message.role == 'assistant' and '</think>' in said %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + said }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n' if said or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') }}
{%- endif %}
"""


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, markers: Sequence[str] = ()
) -> Tokenizer:
    """Learns merges from ``texts``; every digit is a separate token.

    Args:
        texts: texts of the corpus.
        vocab_size: total number of tokens.
        markers: tokens at the end of the vocabulary that do not come from merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(markers),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, directory: Path, max_length: int, template: str = CHAT_TEMPLATE
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": TURN_END,
        "pad_token": PADDING,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": [END_OF_TEXT, TURN_START],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(template)


def segments(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """Segments of the rendered conversation, and for each whether the model must generate it.

    Segments end at the chat template's generation prompts, so that encoding them separately gives
    the same tokens as encoding the whole conversation.
    """
    if conversation.system is not None:
        yield f"{TURN_START}system\n{conversation.system}{TURN_END}\n", False
    for turn in conversation.turns:
        prompt = f"{TURN_START}user\n{turn.user}{TURN_END}\n{TURN_START}assistant\n"
        answer = f"{turn.assistant}{TURN_END}"
        if conversation.thought is not None and turn is conversation.turns[-1]:
            prompt += "<think>\n"
            answer = f"{conversation.thought}{THOUGHT_END}{answer}"
        yield prompt, False
        yield answer, True
        yield "\n", False
