"""Reasons why some of vLLM's tests are skipped or fail, by pattern; the first match applies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

IN_PROCESS = "in process"
"""Tests of vLLM's own classes, without an endpoint."""
OTHER_ROUTE = "other route"
"""Tests of a route or server that rayfleet does not have."""
FEATURE = "feature"
"""Tests of an unsupported feature, which is rejected with an error that names it."""
FORM = "form"
"""Tests of behavior in which vLLM differs from OpenAI's API, or is less strict than rayfleet."""
MODEL = "model"
"""Tests that the demo model is not capable of; may pass by chance."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the tests that match a pattern may fail."""

    kind: str
    pattern: str
    """Pattern of a test or file; `*` matches any text."""
    text: str


_CHAT = "entrypoints/openai/chat_completion"
_COMPLETION = "entrypoints/openai/completion"
_RESPONSES = "entrypoints/openai/responses"
_CALLS = f"{_CHAT}/test_completion_with_function_calling.py"

_UNITS = "calls functions and classes directly, not an endpoint"

LEFT_OUT = (
    Reason(OTHER_ROUTE, "*/test_batched_chat_completions.py", "/v1/chat/completions/batch"),
    Reason(FEATURE, "*_with_prompt_embeds.py", "prompts are text or token ids, not embeddings"),
    Reason(OTHER_ROUTE, "entrypoints/openai/decisions/*", "/v1/decisions"),
    Reason(OTHER_ROUTE, "*/correctness/*", "measures a model, not an endpoint"),
    Reason(OTHER_ROUTE, "*/test_openai_schema.py", "tested with rayfleet's own OpenAPI document"),
    Reason(OTHER_ROUTE, f"{_RESPONSES}/test_mcp_tools.py", "tools that the server runs itself"),
    Reason(OTHER_ROUTE, f"{_RESPONSES}/test_parsable_context.py", "as above: Python and MCP"),
    Reason(OTHER_ROUTE, f"{_RESPONSES}/test_harmony.py", "gpt-oss-20b with vLLM's own tools"),
    Reason(MODEL, "*/test_openai_tool_parser.py", "measures how well gpt-oss-20b calls functions"),
    Reason(OTHER_ROUTE, "*/test_tensorizer_entrypoint.py", "loads vLLM's tensorizer files"),
    Reason(OTHER_ROUTE, "*_vlm.py", "needs a model with vision"),
    Reason(OTHER_ROUTE, "*/instrumentator/test_*metrics*.py", "names of vLLM's own metrics"),
    Reason(OTHER_ROUTE, "*/instrumentator/test_uds.py", "only TCP is supported"),
    Reason(OTHER_ROUTE, "tool_use/mistral/*", "needs Mistral's tokenizer and its models"),
    Reason(IN_PROCESS, f"{_CHAT}/test_*_validation.py", _UNITS),
    Reason(IN_PROCESS, f"{_CHAT}/test_chat_error.py", _UNITS),
    Reason(IN_PROCESS, f"{_CHAT}/test_message_assembly.py", _UNITS),
    Reason(IN_PROCESS, f"{_CHAT}/test_serving_chat.py", _UNITS),
    Reason(IN_PROCESS, f"{_CHAT}/test_stream_processor.py", _UNITS),
    Reason(IN_PROCESS, f"{_COMPLETION}/test_completion_*.py", _UNITS),
    Reason(IN_PROCESS, f"{_COMPLETION}/test_lora_resolvers.py", _UNITS),
    Reason(IN_PROCESS, f"{_RESPONSES}/*", _UNITS),
    Reason(IN_PROCESS, "entrypoints/openai/parser/*", _UNITS),
    Reason(IN_PROCESS, "entrypoints/openai/test_*.py", _UNITS),
    Reason(IN_PROCESS, "*/test_serving_tokenization.py", _UNITS),
    Reason(IN_PROCESS, "tool_use/test_*.py", _UNITS),
    Reason(IN_PROCESS, "entrypoints/anthropic/*", _UNITS),
)
"""Files that are not run."""

_ECHO = f"{_CHAT}/test_chat_echo.py"
_SMALL = "the demo model cannot do this"
_MANY_LOGPROBS = "at most 20 log-probabilities per token"
_OWN_TOKENS = "requested tokens are only in top_logprobs"
_LAST_CHUNK = "the last chunk of a chat has an empty delta, as in OpenAI's API"
_ABSENT = "unrequested vLLM fields are omitted, not null"

REASONS = (
    # Other routes and flags of the server.
    Reason(OTHER_ROUTE, "*::test_invocations", "/invocations of Amazon SageMaker"),
    Reason(OTHER_ROUTE, "*::test_tokenizer_info*", "/tokenizer_info: --tokenizer is public"),
    Reason(FEATURE, "*::test_kv_transfer_*", "disaggregated prefill is not supported"),
    Reason(FEATURE, "*::test_per_request_metrics_*", "times are in the field slo, if requested"),
    Reason(FEATURE, "*::test_chat_with_enable_force_include_usage", "requested by include_usage"),
    Reason(
        FEATURE, "*/test_token_in_token_out.py::*", "servers without a tokenizer are not supported"
    ),
    Reason(FEATURE, "*::test_*_return_tokens_as_token_ids_*[True]", "requested per request"),
    # Unsupported fields.
    Reason(FEATURE, f"{_ECHO}::test_chat_session_*[test_case0]", "echo is only in /v1/completions"),
    Reason(FEATURE, f"{_ECHO}::test_*_logprobs", _MANY_LOGPROBS),
    Reason(FEATURE, "*::test_logprob_token_ids_returns_*", _OWN_TOKENS),
    Reason(FEATURE, "*::test_logprob_token_ids_stream*", _OWN_TOKENS),
    Reason(FEATURE, "*/test_completion.py::test_logprob_token_ids", _OWN_TOKENS),
    Reason(
        FEATURE, "*::test_completion_truncation_side_*", "only truncation on the left is supported"
    ),
    Reason(FEATURE, "*::test_batch_completions*", "no beam search"),
    Reason(FEATURE, "*::test_thinking_token_budget_*", "the demo model does not reason"),
    Reason(FEATURE, "*::test_enable_response_messages*", "return_token_ids is only for chats"),
    Reason(FEATURE, "*::test_namespace_tool_separator*", "tools are functions, without namespaces"),
    # Response formats.
    Reason(FORM, "*::test_custom_role", "only OpenAI's roles: templates drop others silently"),
    Reason(FORM, "*::test_long_seed", "a 400 with another message than pydantic's"),
    Reason(FORM, "*::test_prompt_logprobs_chat[*-None]", _ABSENT),
    Reason(FORM, "*::test_prompt_logprobs_completion[*-None]", _ABSENT),
    Reason(FORM, "*::test_single_completion*", _ABSENT),
    Reason(FORM, "*::test_basic_completion_with_emoji*", _ABSENT),
    Reason(FORM, "*/test_chat.py::test_chat_streaming*", _LAST_CHUNK),
    Reason(FORM, "*/test_chat.py::test_chat_completion_stream_options*", _LAST_CHUNK),
    Reason(IN_PROCESS, "*::test_load_prompt_embeds[*", _UNITS),
    Reason(FORM, "*::test_anthropic_streaming_cache_usage", "no usage field for cached tokens"),
    Reason(FORM, "*::test_background_error", "a 400 with another message"),
    Reason(FORM, "*::test_cancel_completed", "a 400 with another message"),
    Reason(FORM, "*::test_empty_prompt", "a 400 with another message"),
    Reason(FORM, "*::test_out_of_vocab_token_ids", "a 400 with another message"),
    # Tests that the demo model is not capable of.
    Reason(MODEL, "*/test_chat.py::test_more_than_one_prompt_logprobs_chat*", _SMALL),
    Reason(MODEL, "*/test_chat.py::test_single_chat_session*", f"{_SMALL}: answers are shorter"),
    Reason(
        MODEL,
        "*/test_chat.py::test_structured_outputs_*_chat",
        f"{_SMALL}: ends or varies differently",
    ),
    Reason(MODEL, "*/test_chat.py::test_response_format_json_*", _SMALL),
    Reason(MODEL, "*/test_chat.py::test_complex_message_content", _SMALL),
    Reason(MODEL, "*/test_chat.py::test_chat_completion_n_parameter_*", f"{_SMALL}: equal answers"),
    Reason(MODEL, "*::test_translategemma_extra_lang_code_fields", "requires Spanish"),
    Reason(MODEL, f"{_CALLS}::test_function_tool_use[*-auto-*", f"{_SMALL}: unforced calls"),
    Reason(MODEL, f"{_CALLS}::test_function_tool_use[plain-True-*", f"{_SMALL}: reasoning"),
    Reason(MODEL, f"{_CALLS}::test_function_tool_use[watermarked-True-*", f"{_SMALL}: reasoning"),
    Reason(MODEL, f"{_CALLS}::test_named_tool_use", f"{_SMALL}: terminating"),
    Reason(
        MODEL, "*/test_completion.py::test_completion_streaming*", f"{_SMALL}: answers are shorter"
    ),
    Reason(MODEL, "*/test_completion.py::test_parallel_*", f"{_SMALL}: equal answers"),
    Reason(MODEL, "*/test_completion.py::test_echo_*", "token 0 is not a text in its vocabulary"),
    Reason(MODEL, f"{_RESPONSES}/test_basic.py::test_simple_input", _SMALL),
    Reason(MODEL, f"{_RESPONSES}/test_basic.py::test_instructions", _SMALL),
    Reason(MODEL, f"{_RESPONSES}/test_basic.py::test_chat", _SMALL),
    Reason(MODEL, f"{_RESPONSES}/*::test_function_tool_use[auto-*", f"{_SMALL}: unforced calls"),
    Reason(MODEL, f"{_RESPONSES}/*::test_function_tool_use[required-*", f"{_SMALL}: reasoning"),
    Reason(MODEL, f"{_RESPONSES}/*::test_function_calling_with_streaming_*", f"{_SMALL}: as above"),
    Reason(MODEL, f"{_RESPONSES}/test_simple.py::test_reasoning_item*", f"{_SMALL}: reasoning"),
    Reason(MODEL, f"{_RESPONSES}/test_simple.py::test_basic[*", f"{_SMALL}: multiplying"),
    Reason(MODEL, f"{_RESPONSES}/test_stateful.py::test_previous_response_id", _SMALL),
    Reason(MODEL, f"{_RESPONSES}/test_stateful.py::test_two_responses_with_same_prev_id", _SMALL),
    Reason(
        MODEL, f"{_RESPONSES}/test_stateful.py::test_background_cancel", "the answer is too short"
    ),
    Reason(MODEL, f"{_RESPONSES}/test_structured_output.py::*", _SMALL),
    Reason(MODEL, "*/test_return_token_ids.py::test_chat_completion_with_tool_use", _SMALL),
    Reason(
        MODEL, "*/test_return_token_ids.py::*_with_emoji_and_token_ids", f"{_SMALL}: terminating"
    ),
    Reason(MODEL, f"{_ECHO}::test_chat_session_*[test_case1]", f"{_SMALL}: terminating"),
    Reason(MODEL, "*/test_root_path.py::*[test_case2]", f"{_SMALL}: continuing a text"),
    Reason(MODEL, "*/test_root_path.py::*[test_case3]", f"{_SMALL}: continuing a text"),
    Reason(MODEL, "*/test_messages.py::test_anthropic_tool_call", f"{_SMALL}: unforced calls"),
    Reason(MODEL, "*/test_messages.py::test_anthropic_structured_output", f"{_SMALL}: terminating"),
    Reason(MODEL, "*/test_chunked_prompt.py::*", f"{_SMALL}: ends after four tokens"),
    Reason(MODEL, "*::test_include_reasoning_*", f"{_SMALL}: ending its reasoning"),
    Reason(MODEL, "*/test_basic.py::test_server_load*", "the request ends before it is counted"),
    Reason(MODEL, "tool_use/*::test_chat_completion_with_tools[*", f"{_SMALL}: calling no tool"),
    Reason(MODEL, "tool_use/test_parallel_tool_calls.py::*", f"{_SMALL}: several calls"),
    Reason(MODEL, "tool_use/test_tool_calls.py::*", f"{_SMALL}: unforced calls"),
)
"""Tests that run and fail."""


def reason_for(name: str, reasons: Sequence[Reason]) -> Reason | None:
    """First reason that matches a test or file."""
    for reason in reasons:
        if re.fullmatch(re.escape(reason.pattern).replace(r"\*", ".*"), name, re.DOTALL):
            return reason
    return None
