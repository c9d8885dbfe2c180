"""LabelTokens: the tokens of labels at the start of a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from router.api.decisions.questions import Question
from router.api.openai.params import chat_prompt
from router.api.openai.protocol import ChatRequest
from router.errors import ApiError, bad_request
from router.fleet import PromptBlocks
from router.parsers import THINKING_SWITCHES
from router.serving import ServedModel
from router.tokens.encoder import ChatPrompt

NOT_IMPLEMENTED = 501
"""HTTP status for models that cannot answer with a label, as in vLLM."""
_MAX_TEXT = 1 << 14
"""Maximum length in characters of a short rendered chat after its last special token. This text is
tokenized once per label."""


def chat_of(
    model: ServedModel, instructions: str | None, arguments: dict[str, Any] | None, message: str
) -> ChatPrompt:
    """A chat that the model answers with a label.

    Args:
        instructions: the system message; None if there is none.
        arguments: `chat_template_kwargs` of the request.
        message: the user's message.

    Raises:
        ApiError: 400 if the arguments enable reasoning, or are not supported.
    """
    if any((arguments or {}).get(name) for name in THINKING_SWITCHES):
        raise bad_request(
            "chat_template_kwargs must not enable reasoning, since the answer is the first token "
            "of the reply",
            "chat_template_kwargs",
        )
    messages = [{"role": "user", "content": message}]
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    chat = ChatRequest(messages=messages, enable_thinking=False, chat_template_kwargs=arguments)
    return chat_prompt(chat, model.dialect, model.tokenizer.chat_template)[0]


class LabelTokens:
    """Finds the token of each label at the start of a reply.

    The tokens are determined from two short chats. Every prompt must end with the longest common
    suffix of their tokens, so that each label has the same token in every prompt.

    Args:
        make_chat: creates a chat that contains a message.

    Raises:
        ApiError: 400 if the chat template adds too much text to a message; 501 if replies of the
            model start with reasoning.
    """

    def __init__(self, model: ServedModel, make_chat: Callable[[str], ChatPrompt]) -> None:
        self._tokenizer = model.tokenizer
        # What follows the last special token is short, and tokenized independently.
        texts = [make_chat(message).render(model.tokenizer) for message in ("x", "?")]
        self._text, other = [model.tokenizer.pieces(text)[-1] for text in texts]
        if len(self._text) > _MAX_TEXT:
            raise bad_request(
                f"the chat template adds more than {_MAX_TEXT} characters: shorten "
                "chat_template_kwargs",
                "chat_template_kwargs",
            )
        self._known: dict[str, int | None] = {}
        self._ids = self._encode(self._text)
        pairs = zip(reversed(self._ids), reversed(self._encode(other)), strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._end = self._ids[len(self._ids) - num_common :]
        dialect = model.dialect
        if dialect.thoughts is not None and dialect.opens_thought(self._text.rstrip(), ""):
            raise ApiError(
                NOT_IMPLEMENTED,
                "this model does not support decisions, since its replies start with reasoning: "
                "use /v1/chat/completions",
                param="model",
            )

    def of(self, question: Question) -> list[list[int]]:
        """Token ids of each option's labels.

        Raises:
            ApiError: 400 if a label is not a single token, or two options have the same token.
        """
        found: list[list[int]] = []
        for label in question.used_labels:
            token_id = self._token(label)
            if token_id is None or [token_id] in found:
                raise bad_request(
                    f"this model cannot answer the question: label {label!r} is not a distinct "
                    "single token of its vocabulary",
                    "questions",
                )
            found.append([token_id])
        known = {token_id for (token_id,) in found}
        for tokens, alias in zip(found, question.aliases, strict=False):
            token_id = self._token(alias)
            if token_id is not None and token_id not in known:
                known.add(token_id)
                tokens.append(token_id)
        return found

    def check(self, prompts: Sequence[PromptBlocks]) -> None:
        """Raises ApiError (400) if a prompt does not end with the tokens after which the labels
        were tokenized."""
        for prompt in prompts:
            end = memoryview(prompt.token_ids).cast("i")[-len(self._end) :].tolist()
            if not self._end or end != self._end:
                raise bad_request(
                    "the end of the rendered prompt depends on the message, so the labels' tokens "
                    "cannot be determined: remove chat_template_kwargs if set, or use another "
                    "model",
                    "chat_template_kwargs",
                )

    def _token(self, label: str) -> int | None:
        """The id of the label's token after the prompt; None if the label is several tokens."""
        if label not in self._known:
            *before, last = self._encode(self._text + label)
            self._known[label] = last if before == self._ids else None
        return self._known[label]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
