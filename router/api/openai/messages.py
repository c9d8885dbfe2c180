"""`chat_messages`: converts a client's messages to the format that chat templates expect."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.openai.values import check_num_values
from router.errors import ApiError, bad_request
from router.parsers import CallIds, mended
from worker.protocol.text.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
LEADING = ("system", "developer")
"""Roles of messages that precede the conversation."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Field with the text of a content part, by the part's type."""
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""Message fields in which chat templates expect reasoning; clients may send the first two."""

OMITTED_NAMES = {
    "file": "file",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
    "video_url": "video",
}
"""Names of omitted content in the note that replaces it, by the type of the content part."""

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TYPE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def chat_messages(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate | None,
    *,
    ids: CallIds = "any",
    single_calls: bool = False,
) -> list[dict[str, Any]]:
    """Converts messages to the format that chat templates expect.

    - content is a single string, in which a note replaces images and parts other than text;
    - `tool_calls` is absent if empty, since templates test for the field; call arguments are
      objects, which templates write as JSON;
    - tool results have the tool's name;
    - reasoning is in the field that the template reads;
    - `developer` becomes `system` if the template does not support that role.

    Args:
        messages: the client's messages.
        template: the model's chat template; None if there is none.
        ids: form of call ids that the template supports; other ids are replaced.
        single_calls: whether the template supports only one call per message and no content
            alongside a call and reasoning: each call then becomes a message followed by its
            result, and content becomes reasoning.

    Raises:
        ApiError: 400 if there are no messages, or one has an unknown role, malformed content or
            malformed calls.
    """
    if not messages:
        raise bad_request("messages must not be empty", "messages")
    made = [_message(index, message) for index, message in enumerate(messages)]
    assistants = [(index, m) for index, m in enumerate(made) if m["role"] == "assistant"]
    if assistants:
        _make_calls(assistants)
        _name_answers(made)
        if ids == "short":
            _shorten_ids(made)
        elif ids == "indexed":
            _index_ids(made)
        names = () if template is None else template.fields(*REASONING_FIELDS)
        for index, message in assistants:
            _rename_reasoning(index, message, names)
        if single_calls:
            made = _with_single_calls(made, names)
    has_developer = any(message["role"] == "developer" for message in made)
    if has_developer and template is not None and not template.quotes("developer"):
        return _with_one_system(made)
    return made


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        problem = f"messages[{index}].role must be one of {known}, got {role!r:.80}"
        raise bad_request(problem, "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(index, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise _wrong(index, "content must be a string or a list of content parts")
    return {**message, "content": content if content is not None else ""}


def _part(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _wrong(index, "content parts must be objects with a type")
    field = TEXT_PARTS.get(kind)
    if field is None:
        return omitted(kind)
    text = part.get(field)
    if not isinstance(text, str):
        raise _wrong(index, f"content parts of type {kind} must have {field}")
    return text


def omitted(kind: str) -> str:
    """The text that replaces content other than text.

    Rejecting such content would end the session of a coding agent, which sends its history with
    each request, including screenshots, PDFs, and parts that only other servers understand.

    Args:
        kind: type of the content in the client's API.
    """
    name = OMITTED_NAMES.get(kind, kind if _TYPE.fullmatch(kind) else "content")
    return f"[{name} omitted: this model takes text only]"


def _make_calls(assistants: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Decodes the arguments of tool calls, and removes empty `tool_calls`."""
    written: list[bytes] = []
    functions: list[dict[str, Any]] = []
    for index, message in assistants:
        if "tool_calls" not in message:
            continue
        calls = message.pop("tool_calls")
        if calls is None or calls == []:
            continue
        if not isinstance(calls, list):
            raise _wrong(index, "tool_calls must be a list of tool calls")
        message["tool_calls"] = [_call(index, place, call) for place, call in enumerate(calls)]
        for call in message["tool_calls"]:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                # Encoding cannot fail: the body's decoder rejects lone surrogates.
                written.append(arguments.encode())
            functions.append(call["function"])
    check_num_values(*written)  # strings in the body, so not counted yet
    for function in functions:
        function["arguments"] = _arguments(function.get("arguments"))


def _call(index: int, place: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise _wrong(index, f"tool_calls[{place}].function must be an object with a name")
    return {**call, "function": {**function}}


class _Arguments(dict[str, Any]):
    """Arguments of a call, written as JSON by templates that print them or append them to a text
    (such as those of InternLM, Apertus and Phi-4-mini)."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: object) -> str:
        return f"{text}{self}" if isinstance(text, str) else NotImplemented

    def __add__(self, text: object) -> str:
        return f"{self}{text}" if isinstance(text, str) else NotImplemented


def _arguments(arguments: Any) -> dict[str, Any]:
    """Arguments of a call as an object.

    Clients replay what the model wrote, valid or not. JSON cut off within an object, for example
    by `max_tokens`, is closed; anything else that is not an object becomes the value of a single
    argument.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return _Arguments()
    given = _decoded(arguments) if isinstance(arguments, str) else arguments
    return _Arguments(given if isinstance(given, dict) else {"arguments": given})


def _decoded(text: str) -> Any:
    """The decoded JSON, even if cut off, with NaN and infinities as strings; otherwise the text."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        return msgspec.json.decode(text)
    whole = mended(text)
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text if whole is None else whole, parse_constant=str)
    return text


def _name_answers(messages: Sequence[dict[str, Any]]) -> None:
    """Adds the tool's name to results, as many clients send only the call id."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()) if message["role"] == "assistant" else ():
            if isinstance(call_id := call.get("id"), str):
                names[call_id] = call["function"]["name"]
        if message["role"] == "tool" and message.get("name") is None:
            call_id = message.get("tool_call_id")
            if isinstance(call_id, str) and call_id in names:
                message["name"] = names[call_id]


def _shorten_ids(messages: Sequence[dict[str, Any]]) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()) if message["role"] == "assistant" else ():
            if isinstance(call_id := call.get("id"), str):
                call["id"] = _short_id(call_id)
        if isinstance(answered := message.get("tool_call_id"), str):
            message["tool_call_id"] = _short_id(answered)


def _index_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replaces call ids with `functions.NAME:INDEX`; INDEX counts the calls of the chat."""
    made: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        for call in message.get("tool_calls", ()) if message["role"] == "assistant" else ():
            indexed = f"functions.{call['function']['name']}:{num_calls}"
            num_calls += 1
            if isinstance(call_id := call.get("id"), str):
                made[call_id] = indexed
            call["id"] = indexed
        answered = message.get("tool_call_id")
        if isinstance(answered, str) and answered in made:
            message["tool_call_id"] = made[answered]


def _with_single_calls(
    messages: Sequence[dict[str, Any]], thoughts: Sequence[str]
) -> list[dict[str, Any]]:
    """The conversation with one call per message, each followed by its result.

    Takes time linear in the number of messages and calls.

    Args:
        messages: messages with calls in the format that chat templates expect.
        thoughts: message fields that hold reasoning.
    """
    made: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if not calls:
            made.append(message)
            continue
        first = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        results = _Results(messages[first:place])
        thought = _thought_before(message, thoughts)
        for call in calls:
            made.append({**thought, "role": "assistant", "content": "", "tool_calls": [call]})
            thought = {}
            made += results.take(call.get("id"))
        made += results.rest()
    return made


class _Results:
    """Results of one message's calls; each can be taken once.

    Args:
        results: the tool messages that follow the calls.
    """

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        self._left = OrderedDict(enumerate(results))
        self._by_id: dict[str, deque[int]] = {}
        """Indices of results by call id, in order."""
        for index, result in self._left.items():
            if isinstance(call_id := result.get("tool_call_id"), str):
                self._by_id.setdefault(call_id, deque()).append(index)

    def take(self, call_id: Any) -> list[dict[str, Any]]:
        """The first result with this call id, or the first remaining one if no result has it; empty
        if no results remain."""
        indices = self._by_id.get(call_id) if isinstance(call_id, str) else None
        while indices:
            index = indices.popleft()
            if index in self._left:
                return [self._left.pop(index)]
        return [self._left.popitem(last=False)[1]] if self._left else []

    def rest(self) -> list[dict[str, Any]]:
        """The results that were not taken."""
        return list(self._left.values())


def _thought_before(message: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Reasoning fields of a message with calls: its reasoning, with its content appended."""
    texts = [message.get(name) for name in names[:1]] + [message["content"]]
    text = "\n".join(text for text in texts if text)
    return dict.fromkeys(names, text) if text and names else {}


def _short_id(call_id: str) -> str:
    """A call id of nine letters and digits: the given one if it has this form, otherwise a hash of
    it."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _rename_reasoning(index: int, message: dict[str, Any], names: Sequence[str]) -> None:
    given = [message.pop(name, None) for name in REASONING_FIELDS[:2]]
    reasoning = next((value for value in given if value is not None), None)
    if reasoning is None:
        return
    if not isinstance(reasoning, str):
        raise _wrong(index, "reasoning must be a string")
    for name in names:
        message.setdefault(name, reasoning)


def _with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins all system and developer messages into one, since many templates accept only a single
    system message, at the beginning."""
    leading = [message for message in messages if message["role"] in LEADING]
    others = [message for message in messages if message["role"] not in LEADING]
    content = "\n\n".join(message["content"] for message in leading)
    return [{**leading[0], "role": "system", "content": content}, *others]


def _wrong(index: int, what: str) -> ApiError:
    return bad_request(f"messages[{index}].{what}", "messages")
