"""43 prompts for a chat model: plain text, Unicode, code, 2,000 tokens, several turns,
completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.campaigns.real.texts import PASSAGES
from worker.protocol.text.tokenizer import Tokenizer

LONG_TOKENS: Final = 2000
"""Minimum tokens of the long prompts."""
_PLAIN: Final = (
    *("What is the capital of France?", "Write a haiku about the sea.", "hi", "Who are you?"),
    *("Explain photosynthesis in two sentences.", "List three fruits.", "Tell me a joke."),
    *("How do I boil an egg?", "What is 17 + 25?", "Why is the sky blue?"),
)
_UNICODE: Final = (
    *("Übersetze ins Englische: Grüße aus München!", "¿Cuál es la capital de España?"),
    *("用一句话介绍北京。", "日本の首都はどこですか？", "Привет! Как дела?", "مرحبا، كيف حالك؟"),  # noqa: RUF001
    *(
        "What does 🦄🌈 mean?",
        "Repeat: café naïve Zürich",
        "👩‍👩‍👧‍👦 how many people?",
        "नमस्ते\u200b!",
    ),
)
_CODE: Final = (
    *("Write a Python function that reverses a string.", "What does `ls -la | wc -l` do?"),
    "Fix this:\n```python\nfor i in range(10)\n    print(i)\n```",
    'Explain this JSON: {"a": [1, 2, {"b": null}], "c": "\\u00e9\\n"}',
    *("SELECT name FROM users WHERE age > 30;", "#include <stdio.h>\nint main() {"),
    *("Write HTML for a link.", "\tif (x) {\n\t\treturn   y;\n\t}\n// what is this?"),
)
_TURNS: Final = (
    *(("My name is Ada.", "Nice to meet you, Ada.", "What is my name?"),),
    *(("2 + 2?", "4", "Times three?", "12", "Minus one?"),),
    *(("Tell me about cats.", "Cats are small carnivores.", "And dogs?"),),
    *(("Bonjour", "Bonjour! Comment puis-je vous aider?", "Parlez-vous anglais?"),),
    *(("Name a color.", "Blue.", "Another.", "Red.", "Another.", "Green.", "Another."),),
    *(("Write a story.", "Once upon a time there was a fox.", "Continue."),),
    *(("hello", "", "Are you there?"),),
    *(("What is RAM?", "Memory.", "In **bold** markdown, please."),),
)
_COMPLETED: Final = (
    *("The quick brown fox", "def fibonacci(n):\n    ", "1, 2, 3, 4, 5,", "Once upon a time"),
)
_ABOUT_LONG: Final = (
    *("Summarize the texts.", "Who is tired of sitting?", "What is the first text about?"),
)


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of all prompts."""
    chats = [encode_chat(tokenizer, messages) for messages in chats_of(tokenizer)]
    return [*chats, *(tokenizer.encode(text) for text in _COMPLETED)]


def chats_of(tokenizer: Tokenizer) -> list[list[dict[str, Any]]]:
    """Messages of all chats."""
    alone = [*_PLAIN, *_UNICODE, *_CODE, *_long(tokenizer.encode)]
    return [_messages(turns) for turns in [*((text,) for text in alone), *_TURNS]]


def completions() -> tuple[str, ...]:
    """Prompts without a chat template."""
    return _COMPLETED


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a chat as encoded by the gateway."""
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def _messages(turns: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(turns)
    ]


def _long(encode: Callable[[str], list[int]]) -> list[str]:
    """Repeated passages, starting with a different one each time, followed by a question."""
    texts = []
    for start, question in enumerate(_ABOUT_LONG):
        parts: list[str] = []
        while len(encode("\n\n".join(parts))) < LONG_TOKENS:
            parts.append(PASSAGES[(start + len(parts)) % len(PASSAGES)])
        texts.append("\n\n".join([*parts, question]))
    return texts
