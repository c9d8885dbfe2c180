"""Known but unsupported body fields: ignored if they do not affect the result, else rejected."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from router.errors import bad_request

_LONGEST_NAME = 64
"""Maximum characters of a field name that are compared and quoted in an error."""


class Refused(NamedTuple):
    """An unsupported field that would change the result."""

    harmless: tuple[object, ...] = ()
    """Accepted values, besides null: they do not change the result."""
    instead: str = "leave it out"
    """What to do instead, quoted in the error."""


class Known(NamedTuple):
    """Body fields that an API knows but does not support."""

    ignored: frozenset[str]
    """Fields that do not change the result."""
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
"""Fields that do not change the text: bookkeeping, scheduling hints, and options of other
tokenizers."""

_NO_ADAPTERS = Refused(instead="serve the merged checkpoint as a model of its own")
_NO_IMAGES = Refused((), "only text is supported")
_OF_TOOLS = Refused(("none", "auto"), "use tools")

REFUSED: dict[str, Refused] = {
    # OpenAI's
    "audio": _NO_IMAGES,
    "best_of": Refused((1,), "use n"),
    "function_call": _OF_TOOLS,
    "functions": Refused(([],), "use tools"),
    "max_completion_tokens": Refused(instead="use max_tokens"),
    "modalities": Refused(([], ["text"]), "only text is supported"),
    "moderation": Refused(),
    "suffix": Refused(("",)),
    "verbosity": Refused(("medium",), "ask for short or long answers in a message"),
    "web_search_options": Refused(),
    # of the other route
    "add_generation_prompt": Refused(instead="use /v1/chat/completions"),
    "add_special_tokens": Refused((False,), "chat templates add them"),
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
    "chat_template": Refused(instead="serve a checkpoint that includes the template"),
    "continue_final_message": Refused((False,), "use /v1/chat/completions"),
    "documents": Refused(([],), "use /v1/chat/completions"),
    "guided_choice": Refused(instead="use structured_outputs.choice"),
    "guided_decoding_backend": Refused(instead="set --structured-outputs-backend for all requests"),
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
    "truncation_side": Refused(("left",), "only truncation on the left is supported"),
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
"""Fields that change the result and that one or both routes do not support."""

COMPLETIONS = Known(IGNORED, REFUSED)
"""Unsupported fields of /v1/chat/completions and /v1/completions."""


def refuse_unknown(
    fields: Mapping[str, Any], supported: Collection[str], known: Known = COMPLETIONS
) -> None:
    """Checks that a route supports or may ignore all fields of a body; null counts as absent.

    Args:
        fields: fields of the body.
        supported: field names that the route supports.
        known: fields that the API knows but does not support.

    Raises:
        ApiError: 400 naming the unsupported or unknown field, and what to do instead.
    """
    for name, value in fields.items():
        if name in supported or value is None or name in known.ignored:
            continue
        refused = known.refused.get(name)
        if refused is None:
            raise bad_request(*_unknown(name, supported))
        if not any(value == harmless for harmless in refused.harmless):
            raise bad_request(f"{name} is not supported: {refused.instead}", name)


def _unknown(name: str, supported: Collection[str]) -> tuple[str, str]:
    """Message and name of an unknown field."""
    name = name[:_LONGEST_NAME]
    close = difflib.get_close_matches(name, supported, n=1, cutoff=0.7)
    instead = f"did you mean {close[0]}?" if close else "leave it out"
    return f"unknown field {name}: {instead}", name
