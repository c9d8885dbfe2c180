"""Body fields that are known but not supported: ignored if they change no result, else refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from router.errors import bad_request

_LONGEST_NAME = 64
"""Most characters of a field's name that are compared, and repeated to the client."""


class Refused(NamedTuple):
    """An unsupported field that would change the result."""

    harmless: tuple[object, ...] = ()
    """Values, besides null, that change no result and are taken."""
    instead: str = "leave it out"
    """Advice for the client, as the error says it."""


class Known(NamedTuple):
    """Body fields of an API that its routes know and do not support."""

    ignored: frozenset[str]
    """Fields that change no result."""
    refused: Mapping[str, Refused]
    """Fields that change the result, by name."""


IGNORED = frozenset(
    (
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
    )
)
"""Fields that change no text: bookkeeping, hints of where and when to compute, and options of other
tokenizers."""

_NO_ADAPTERS = Refused(instead="serve the merged checkpoint as a model of its own")
_NO_IMAGES = Refused((), "this server takes text alone")
_OF_TOOLS = Refused(("none", "auto"), "use tools")

REFUSED: dict[str, Refused] = {
    # OpenAI's
    "audio": _NO_IMAGES,
    "best_of": Refused((1,), "use n"),
    "function_call": _OF_TOOLS,
    "functions": Refused(([],), "use tools"),
    "max_completion_tokens": Refused(instead="use max_tokens"),
    "modalities": Refused(([], ["text"]), "this server takes text alone"),
    "moderation": Refused(),
    "suffix": Refused(("",)),
    "verbosity": Refused(("medium",), "say in a message how long answers shall be"),
    "web_search_options": Refused(),
    # of the other route
    "add_generation_prompt": Refused(instead="use /v1/chat/completions"),
    "add_special_tokens": Refused((False,), "chat templates write them"),
    "chat_template_kwargs": Refused(({},), "use /v1/chat/completions"),
    "echo": Refused((False,)),
    "messages": Refused(instead="use /v1/chat/completions"),
    "parallel_tool_calls": Refused((True, False)),
    "prompt": Refused(instead="use messages, or /v1/completions"),
    "reasoning_effort": Refused(("none",), "use /v1/chat/completions"),
    "tool_choice": _OF_TOOLS,
    "tools": Refused(([],), "use /v1/chat/completions"),
    "top_logprobs": Refused((0,), "use logprobs with a number"),
    # vLLM's
    "chat_template": Refused(instead="start the server with a checkpoint that has it"),
    "continue_final_message": Refused((False,), "use /v1/chat/completions"),
    "documents": Refused(([],), "use /v1/chat/completions"),
    "guided_choice": Refused(instead="use structured_outputs.choice"),
    "guided_decoding_backend": Refused(instead="--structured-outputs-backend is for all requests"),
    "guided_grammar": Refused(instead="use structured_outputs.grammar"),
    "guided_json": Refused(instead="use structured_outputs.json"),
    "guided_regex": Refused(instead="use structured_outputs.regex"),
    "guided_whitespace_pattern": Refused(),
    "include_reasoning": Refused((True, False), "use /v1/chat/completions"),
    "kv_transfer_params": Refused(),
    "length_penalty": Refused((1,)),
    "logits_processors": Refused(([],)),
    "logprob_token_ids": Refused(([],), "use top_logprobs"),
    "media_io_kwargs": Refused(({},), _NO_IMAGES.instead),
    "mm_processor_kwargs": Refused(({},), _NO_IMAGES.instead),
    "prompt_embeds": Refused(instead="use prompt"),
    "repetition_detection": Refused(instead="use repetition_penalty"),
    "return_prompt_text": Refused((False,), "use return_token_ids"),
    "return_token_offsets": Refused((False,), "use return_token_ids"),
    "thinking_token_budget": Refused(instead="use max_completion_tokens"),
    "truncation_side": Refused(("left",), "prompts keep their last tokens"),
    "use_beam_search": Refused((False,)),
    "vllm_xargs": Refused(({},)),
    # SGLang's
    "bootstrap_host": Refused(),
    "bootstrap_port": Refused(),
    "bootstrap_room": Refused(),
    "custom_logit_processor": Refused(),
    "custom_params": Refused(({},)),
    "ebnf": Refused(instead="use structured_outputs.grammar"),
    "extra_key": Refused(("",), "use cache_salt"),
    "input_ids": Refused(instead="use prompt of /v1/completions"),
    "json_schema": Refused(instead="use response_format, or structured_outputs.json"),
    "lora_path": _NO_ADAPTERS,
    "no_stop_trim": Refused((False,), "use include_stop_str_in_output"),
    "regex": Refused(instead="use structured_outputs.regex"),
    "return_hidden_states": Refused((False,)),
    "return_routed_experts": Refused((False,)),
    "return_cached_tokens_details": Refused((False,), "see usage.prompt_tokens_details"),
    "separate_reasoning": Refused((True,), "use --reasoning-parser none"),
    "session_params": Refused(({},), "use prompt_cache_key"),
    "stop_regex": Refused(([], ""), "use stop"),
    "stream_reasoning": Refused((True,)),
}
"""Fields that change the result and are not supported, by one route or both."""

COMPLETIONS = Known(IGNORED, REFUSED)
"""Unsupported fields of /v1/chat/completions and /v1/completions."""


def refuse_unknown(
    fields: Mapping[str, Any], supported: Collection[str], known: Known = COMPLETIONS
) -> None:
    """Checks that a route supports all fields of a body, or may ignore them; null is no value.

    Args:
        fields: fields of the body.
        supported: names of fields that the route supports.
        known: fields that it knows and does not support.

    Raises:
        ApiError: 400 that names an unsupported or unknown field, and says what to do instead.
    """
    for name, value in fields.items():
        if name in supported or value is None or name in known.ignored:
            continue
        refused = known.refused.get(name)
        if refused is None:
            raise bad_request(*_unknown(name, supported))
        if not any(value == harmless for harmless in refused.harmless):
            raise bad_request(f"{name} is not supported here: {refused.instead}", name)


def _unknown(name: str, supported: Collection[str]) -> tuple[str, str]:
    """Message and name of an unknown field."""
    name = name[:_LONGEST_NAME]
    close = difflib.get_close_matches(name, supported, n=1, cutoff=0.7)
    instead = f"did you mean {close[0]}?" if close else "leave it out"
    return f"{name} is no field of this request: {instead}", name
