"""Byte-level BPE with single-token digits, trained on the corpus and saved as Hugging Face does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deploy.models.corpus import Conversation

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
PADDING: Final = "<|pad|>"
MASK: Final = "<|MASK|>"
"""Stands for what is not decided yet; only in tokenizers of block-diffusion models."""
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END, PADDING)

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


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from ``texts``; every digit stays a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
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
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def segments(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """The rendered conversation in pieces, each with whether the model has to produce it.

    The pieces are cut where the chat template puts the model to work, so that encoding them one
    by one gives the tokens of the whole.
    """
    if conversation.system is not None:
        yield f"{TURN_START}system\n{conversation.system}{TURN_END}\n", False
    for turn in conversation.turns:
        yield f"{TURN_START}user\n{turn.user}{TURN_END}\n{TURN_START}assistant\n", False
        yield f"{turn.assistant}{TURN_END}", True
        yield "\n", False
