"""Unsupported body fields: ignored if they do not affect the result, otherwise rejected."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args

import msgspec

from router.errors import bad_request
from worker.protocol.analyzed import analyzed

_LONGEST_NAME = 64
"""Length in characters to which a field name is cut before it is compared and quoted in an error.
"""
_MAX_HINTS = 128
"""Maximum number of actions in `kv_hints`."""


class UnsupportedField(NamedTuple):
    """An unsupported field that would change the result."""

    harmless: tuple[object, ...] = ()
    """Accepted values, besides null: they do not change the result."""
    instead: str = "omit it"
    """Alternative that the error suggests."""


class KnownFields(NamedTuple):
    """Body fields of an API that are ignored or rejected."""

    ignored: frozenset[str]
    """Fields that do not change the result."""
    unsupported: Mapping[str, UnsupportedField]
    """Fields that change the result, by name."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Handles request parts that have no effect on this server."""

    count: Callable[[str], None]
    """Counts an ignored part by its field, or `FIELD.TYPE`, in the metrics."""
    is_beta: bool = False
    """Whether the client uses beta features of the API, so that unknown fields are ignored."""


class _HintAction(msgspec.Struct):
    action_type: Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)]


class _KvHints(msgspec.Struct):
    """The field `kv_hints`: hints about the KV cache, as in vLLM and SGLang."""

    actions: Annotated[list[_HintAction], msgspec.Meta(max_length=_MAX_HINTS)] = []


IGNORED = frozenset(
    (
        "client_metadata",
        "data_parallel_rank",
        "custom_labels",
        "metadata",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "stream_interval",
        "usage",
        "verbosity",
    )
)
"""Fields that do not change the text: bookkeeping, scheduling hints, options of other tokenizers,
OpenRouter's `usage` (always reported), and `verbosity`, which no served model supports."""

_NO_ADAPTERS = UnsupportedField(instead="serve the merged checkpoint as a model of its own")
_NO_IMAGES = UnsupportedField((), "only text is supported")
_OF_TOOLS = UnsupportedField(("none", "auto"), "use tools")

REFUSED: dict[str, UnsupportedField] = {
    # OpenAI's
    "audio": _NO_IMAGES,
    "best_of": UnsupportedField((1,), "use n"),
    "function_call": _OF_TOOLS,
    "functions": UnsupportedField(([],), "use tools"),
    "max_completion_tokens": UnsupportedField(instead="use max_tokens"),
    "modalities": UnsupportedField(([], ["text"]), "only text is supported"),
    "moderation": UnsupportedField(),
    "suffix": UnsupportedField(("",)),
    "web_search_options": UnsupportedField(),
    # of the other route
    "add_generation_prompt": UnsupportedField(instead="use /v1/chat/completions"),
    "add_special_tokens": UnsupportedField((False,), "chat templates add them"),
    "chat_template_kwargs": UnsupportedField(({},), "use /v1/chat/completions"),
    "echo": UnsupportedField((False,)),
    "enable_thinking": UnsupportedField((False,), "use /v1/chat/completions"),
    "messages": UnsupportedField(instead="use /v1/chat/completions"),
    "parallel_tool_calls": UnsupportedField((True, False)),
    "prompt": UnsupportedField(instead="use messages, or /v1/completions"),
    "reasoning": UnsupportedField(({},), "use /v1/chat/completions"),
    "reasoning_effort": UnsupportedField(("none",), "use /v1/chat/completions"),
    "thinking": UnsupportedField((False,), "use /v1/chat/completions"),
    "tool_choice": _OF_TOOLS,
    "tools": UnsupportedField(([],), "use /v1/chat/completions"),
    "top_logprobs": UnsupportedField((0,), "use logprobs with a number"),
    # vLLM's
    "chat_template": UnsupportedField(instead="serve a checkpoint that includes the template"),
    "continue_final_message": UnsupportedField((False,), "use /v1/chat/completions"),
    "documents": UnsupportedField(([],), "use /v1/chat/completions"),
    "guided_choice": UnsupportedField(instead="use structured_outputs.choice"),
    "guided_decoding_backend": UnsupportedField(
        instead="set --structured-outputs-backend for all requests"
    ),
    "guided_grammar": UnsupportedField(instead="use structured_outputs.grammar"),
    "guided_json": UnsupportedField(instead="use structured_outputs.json"),
    "guided_regex": UnsupportedField(instead="use structured_outputs.regex"),
    "guided_whitespace_pattern": UnsupportedField(),
    "include_reasoning": UnsupportedField((True, False), "use /v1/chat/completions"),
    "kv_transfer_params": UnsupportedField(),
    "length_penalty": UnsupportedField((1,)),
    "logits_processors": UnsupportedField(([],)),
    "media_io_kwargs": UnsupportedField(({},), _NO_IMAGES.instead),
    "mm_processor_kwargs": UnsupportedField(({},), _NO_IMAGES.instead),
    "prompt_embeds": UnsupportedField(instead="use prompt"),
    "repetition_detection": UnsupportedField(instead="use repetition_penalty"),
    "return_prompt_text": UnsupportedField((False,), "use return_token_ids"),
    "return_token_offsets": UnsupportedField((False,), "use return_token_ids"),
    "thinking_token_budget": UnsupportedField(instead="use /v1/chat/completions"),
    "truncation_side": UnsupportedField(("left",), "only truncation on the left is supported"),
    "use_beam_search": UnsupportedField((False,)),
    "vllm_xargs": UnsupportedField(({},)),
    # SGLang's
    "bootstrap_host": UnsupportedField(),
    "bootstrap_port": UnsupportedField(),
    "bootstrap_room": UnsupportedField(),
    "custom_logit_processor": UnsupportedField(),
    "custom_params": UnsupportedField(({},)),
    "ebnf": UnsupportedField(instead="use structured_outputs.grammar"),
    "extra_key": UnsupportedField(("",), "use cache_salt"),
    "input_ids": UnsupportedField(instead="use prompt of /v1/completions"),
    "json_schema": UnsupportedField(instead="use response_format, or structured_outputs.json"),
    "lora_path": _NO_ADAPTERS,
    "no_stop_trim": UnsupportedField((False,), "use include_stop_str_in_output"),
    "regex": UnsupportedField(instead="use structured_outputs.regex"),
    "return_hidden_states": UnsupportedField((False,)),
    "return_routed_experts": UnsupportedField((False,)),
    "return_cached_tokens_details": UnsupportedField((False,), "see usage.prompt_tokens_details"),
    "separate_reasoning": UnsupportedField((True,), "use --reasoning-parser none"),
    "session_params": UnsupportedField(({},), "use prompt_cache_key"),
    "stop_regex": UnsupportedField(([], ""), "use stop"),
    "stream_reasoning": UnsupportedField((True,)),
}
"""Fields that change the result and that /v1/chat/completions, /v1/completions or both do not
support."""

RAYFLEET_OBJECTS = ("slo",)
"""Objects of this server's API, whose fields are checked even if the client uses beta features."""
COMPLETIONS = KnownFields(IGNORED, REFUSED)
"""Fields of /v1/chat/completions and /v1/completions that are ignored or rejected."""


def check_supported(
    fields: Mapping[str, Any],
    supported: Collection[str],
    known: KnownFields = COMPLETIONS,
    ignored: Ignored | None = None,
) -> None:
    """Checks that a route supports or may ignore all fields of a body; null counts as absent.

    `kv_hints` are valid in all APIs.

    Args:
        fields: fields of the body.
        supported: field names that the route supports.
        known: fields of the API that are not supported.
        ignored: handling of unknown fields; None rejects them.

    Raises:
        ApiError: 400 naming the unsupported or unknown field, and what to do instead.
    """
    for name, value in fields.items():
        if name in supported or value is None or name in known.ignored:
            continue
        if name == "kv_hints":
            _ignore_hints(value, ignored)
            continue
        field = known.unsupported.get(name)
        if field is None:
            if ignored is None or not ignored.is_beta:
                raise bad_request(*_unknown(name, supported))
            ignored.count(name)
            continue
        if not any(value == harmless for harmless in field.harmless):
            raise bad_request(f"{name} is not supported: {field.instead}", name)


def without_unknown(
    given: Mapping[str, Any], kind: type[msgspec.Struct], ignored: Ignored, where: str = ""
) -> dict[str, Any]:
    """A copy of an object without the fields that `kind`, or a strict type nested in it, lacks.

    Args:
        given: the object.
        kind: the type to which it will be converted.
        ignored: counts the removed fields.
        where: prefix of the removed fields' names, such as `thinking.`.
    """
    kept: dict[str, Any] = {}
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name not in types:
            ignored.count(f"{where}{name}")
            continue
        is_ours = name in RAYFLEET_OBJECTS or not isinstance(value, dict)
        strict = None if is_ours else _strict_type(types[name])
        if strict is not None:
            value = without_unknown(value, strict, ignored, f"{where}{name}.")
        kept[name] = value
    return kept


def _ignore_hints(value: Any, ignored: Ignored | None) -> None:
    """Counts hints (retain, release, demote, prefetch, ...), which are not applied.

    Clients such as Claude Code set retention on all requests, so it does not indicate which blocks
    to keep.
    """
    try:
        hints = msgspec.convert(value, analyzed(_KvHints))
    except msgspec.ValidationError as error:
        raise bad_request(f"kv_hints: {error}", "kv_hints") from error
    if ignored is not None:
        for action in hints.actions:
            ignored.count(f"kv_hints.{action.action_type}")


def _strict_type(kind: Any) -> type[msgspec.Struct] | None:
    """Type of an optional field if it is a struct that forbids unknown fields; otherwise None."""
    for option in (kind, *get_args(kind)):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option if option.__struct_config__.forbid_unknown_fields else None
    return None


def _unknown(name: str, supported: Collection[str]) -> tuple[str, str]:
    """Message and name of an unknown field."""
    name = name[:_LONGEST_NAME]
    close = difflib.get_close_matches(name, supported, n=1, cutoff=0.7)
    instead = f"did you mean {close[0]}?" if close else "omit it"
    return f"unknown field {name}: {instead}", name
