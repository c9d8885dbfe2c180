"""Request bodies of /v1/decisions (OpenAI) and /v1/systemone (TypeSafe), as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.openai.fields import IGNORED, KnownFields, UnsupportedField
from router.api.openai.protocol import MAX_CACHE_SALT
from worker.protocol.slo import Slo

KNOWN = KnownFields(
    IGNORED,
    {
        "decision_template": UnsupportedField(instead="use instructions"),
        "images": UnsupportedField(([],), "only text is supported"),
        "seed": UnsupportedField(),
        "stream": UnsupportedField((False,)),
        "tools": UnsupportedField(([],)),
    },
)
"""Fields of OpenAI's and TypeSafe's APIs that are not supported."""

MAX_QUESTIONS = 64
MAX_CHOICES = 26
"""Maximum number of options of a choice, which are labeled A to Z."""
MAX_LEVELS = 10
"""Maximum number of levels of a score; those of /v1/systemone are labeled 0 to 9."""


class AskRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that /v1/decisions and /v1/systemone have in common. None means the default."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT)] | None = None
    prompt_cache_key: str | None = None
    """Conversation id for the session gate and the session routing policy, unless a header or
    `user` has one."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text in a message or in instructions."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None
    """Ignored: prefixes are always cached."""


class JsonPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_json"):
    """JSON in a message or in instructions, which the model reads as text."""

    data: dict[str, Any] | list[dict[str, Any]]


Content = str | list[TextPart | JsonPart]


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the input."""

    content: Content
    role: Literal["user"]
    type: Literal["message"] = "message"


class Predicate(
    msgspec.Struct, frozen=True, tag_field="type", tag="predicate", forbid_unknown_fields=True
):
    """Asks for the probability that a statement about the input is true."""

    instructions: Content
    name: str | None = None


class ChoiceOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An option of a choice."""

    value: str | bool
    description: str | None = None


class Choice(
    msgspec.Struct, frozen=True, tag_field="type", tag="choice", forbid_unknown_fields=True
):
    """Asks the model to choose one of several options."""

    instructions: Content
    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=MAX_CHOICES)]
    name: str | None = None


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A level of a score."""

    label: str
    description: str | None = None


class Score(msgspec.Struct, frozen=True, tag_field="type", tag="score", forbid_unknown_fields=True):
    """Asks for a level on an ordered scale."""

    instructions: Content
    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_LEVELS)]
    name: str | None = None


class DecisionRequest(AskRequest, kw_only=True, frozen=True):
    """Body of /v1/decisions."""

    input: str | list[InputMessage]
    """What the questions are about."""
    questions: Annotated[
        list[Predicate | Choice | Score], Meta(min_length=1, max_length=MAX_QUESTIONS)
    ]


class SystemOneQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question of /v1/systemone."""

    type: Literal["choice", "noul", "score"]
    instructions: str | None = None
    criteria: dict[str, str | None] | list[str] | None = None
    """Descriptions of a choice's options by name, or of `true` and `false` for a `noul` (a yes-no
    question); for a score, the list of its levels."""


class SystemOneRequest(AskRequest, kw_only=True, frozen=True):
    """Body of /v1/systemone."""

    state: Any
    """What the questions are about: a text, or JSON, which the model reads as text."""
    questions: Annotated[dict[str, SystemOneQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    """Questions by id."""
    instructions: str | None = None
    """System message."""
    chat_template_kwargs: dict[str, Any] | None = None
