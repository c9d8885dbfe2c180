"""Converts the fields of a body to sampling parameters and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api.openai.messages import chat_messages
from router.api.openai.protocol import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Effort,
    ReasoningOptions,
    StreamOptions,
)
from router.api.openai.structured import structured_outputs
from router.api.openai.tools import ToolUse, tool_use
from router.errors import bad_request
from router.parsers import BUDGET_VARIABLE, THINKING_SWITCHES, Dialect
from router.tokens.encoder import ChatPrompt
from worker.protocol.analyzed import analyzed
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.sampling import InvalidParameter, SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.chat_template import ChatTemplate

MAX_COMPLETIONS = 2048
"""Maximum number of completions per request: prompts times n."""
MAX_ENTRIES = 2**20
"""Maximum number of texts and tokens in a request's parameters, multiplied by its number of
completions, since the engine copies some of them per completion. A million entries take 0.1 s and
50 MB."""
MAX_STOP_CHARACTERS = 8192
"""Maximum total length in characters of all stop strings, which are searched for in each choice's
text. Also the maximum total length of all bad words."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""
RESERVED_TEMPLATE_NAMES = (
    "documents",
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "self",
)
"""Chat template variables that clients must not set."""
_MADE_HERE = frozenset(
    ("max_tokens", "logprobs", "prompt_logprobs", "structured_outputs", "diffusion")
)
"""Fields of SamplingParams that do not map to a single body field."""
_PASSED_ON = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in CommonRequest.__struct_fields__ and name not in _MADE_HERE
)
"""Fields of SamplingParams that are copied from the body."""


def sampling_params(
    request: CommonRequest,
    defaults: Mapping[str, Any],
    *,
    names: Mapping[str, str],
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Sampling parameters; omitted values default to `defaults`, then to vLLM's defaults.

    Args:
        request: the body of the request.
        defaults: default values by field of SamplingParams.
        names: the client's field names where they differ (see `client_names`).
        vocab_size: size of the vocabulary in tokens.
        max_tokens: maximum tokens per completion; None for up to the model's context length.
        logprobs: number of top tokens to return per token; None to omit log-probabilities.
        prompt_logprobs: the same for the prompt.
        form: structured output required by tools, replacing the request's; None if there is none.

    Raises:
        ApiError: 400 naming the field and its allowed range.
    """
    given = {name: getattr(request, name) for name in _PASSED_ON}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if ends := defaults.get("stop_token_ids"):
        ends = () if request.ignore_eos else ends
        values["stop_token_ids"] = (*dict.fromkeys((*(request.stop_token_ids or ()), *ends)),)
    _check_length("stop", [request.stop] if isinstance(request.stop, str) else request.stop)
    _check_length("bad_words", request.bad_words)
    _check_num_allowed(request, vocab_size)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=form
            or structured_outputs(request.response_format, request.structured_outputs),
            diffusion=_diffusion(request),
            **values,
        )
    except InvalidParameter as error:
        raise bad_request(error.message, names.get(error.param, error.param)) from error


def client_names(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    """The names that the client used for fields with several names, for error messages."""
    names = {}
    if isinstance(request, ChatRequest):
        names["prompt"] = "messages"
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    if request.structured_outputs is None and request.response_format is not None:
        names["structured_outputs"] = "response_format"
    return names


def chat_max_tokens(request: ChatRequest) -> int | None:
    """Maximum tokens of a chat completion; None for up to the model's context length."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def completion_max_tokens(request: CompletionRequest) -> int:
    """Maximum tokens per completion of a request to /v1/completions."""
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def chat_logprobs(request: ChatRequest) -> int | None:
    """Number of top tokens to return per token; None to omit log-probabilities.

    Raises:
        ApiError: 400 for top_logprobs without logprobs.
    """
    if not request.logprobs:
        if request.top_logprobs:
            raise bad_request("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        return None
    return request.top_logprobs or 0


def prompt_logprobs(request: CommonRequest) -> int | None:
    """Number of top tokens to return per prompt token; None to omit log-probabilities.

    Raises:
        ApiError: 400 for streams, whose chunks have no field for them.
    """
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not supported when stream is true", "prompt_logprobs")
    return request.prompt_logprobs


def check_echo(request: CompletionRequest) -> None:
    """Raises ApiError (400) if prompts are truncated and echoed: truncated prompts have no text."""
    if request.echo and request.truncate_prompt_tokens is not None:
        raise bad_request(
            "truncate_prompt_tokens is not supported with echo", "truncate_prompt_tokens"
        )


def check_num_completions(num_prompts: int, sampling: SamplingParams) -> None:
    """Raises ApiError (400) if a request has too many completions, or too many texts and tokens in
    its parameters."""
    n = sampling.n
    field = "n" if n > 1 else "prompt"
    if num_prompts * n > MAX_COMPLETIONS:
        raise bad_request(
            f"{num_prompts} prompts with n = {n} require {num_prompts * n} completions; the "
            f"maximum per request is {MAX_COMPLETIONS}",
            field,
        )
    if num_prompts * n * sampling.num_entries > MAX_ENTRIES:
        raise bad_request(
            f"too many texts and tokens in stop, stop_token_ids, logit_bias, bad_words and "
            f"allowed_token_ids: {sampling.num_entries} for each of {num_prompts * n} completions; "
            f"the maximum is {MAX_ENTRIES} in total",
            field,
        )


def continues_message(request: ChatRequest) -> bool:
    """Whether the model continues the last message. Raises ApiError (400) if it cannot."""
    if not request.continue_final_message:
        return False
    if request.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt are mutually exclusive",
            "continue_final_message",
        )
    last = request.messages[-1]
    if last.get("role") != "assistant" or not last.get("content"):
        raise bad_request(
            "continue_final_message requires the last message to be an assistant message with text",
            "continue_final_message",
        )
    return True


def stream_options(request: CommonRequest) -> StreamOptions | None:
    """Options of the stream; None for the defaults. Raises ApiError (400) if options are set for a
    request that is not streamed."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    return request.stream_options


def template_arguments(request: ChatRequest, template: ChatTemplate | None) -> dict[str, Any]:
    """Variables of the chat template.

    Raises:
        ApiError: 400 for reserved variable names, and for documents or an effort that the template
            does not support.
    """
    values = request.chat_template_kwargs or {}
    for name in RESERVED_TEMPLATE_NAMES:
        if name in values:
            raise bad_request(
                f"chat_template_kwargs must not contain {name}", "chat_template_kwargs"
            )
    effort, thinks = _reasoning(request)
    budget = 0 if thinks is False else request.thinking_token_budget
    if budget is not None and template is not None and template.reads(BUDGET_VARIABLE):
        values = {BUDGET_VARIABLE: budget, **values}
    if request.documents:
        if template is not None and not template.reads("documents"):
            raise bad_request(
                "this model's chat template does not support documents: put them in a message",
                "documents",
            )
        values = {**values, "documents": request.documents}
    if thinks is None or template is None:
        return values
    if not template.reads("reasoning_effort", *THINKING_SWITCHES):
        if thinks and request.reasoning_effort is not None:
            raise bad_request(
                "this model's chat template does not support reasoning_effort: omit it",
                "reasoning_effort",
            )
        return values
    efforts = {} if effort is None else {"reasoning_effort": effort}
    return {**efforts, **dict.fromkeys(THINKING_SWITCHES, thinks), **values}


def shows_reasoning(request: ChatRequest) -> bool:
    """Whether responses include the reasoning."""
    is_excluded = request.reasoning is not None and request.reasoning.exclude
    return request.include_reasoning is not False and not is_excluded


def _reasoning(request: ChatRequest) -> tuple[Effort | None, bool | None]:
    """The effort, and whether the model reasons; each is None to use the template's default."""
    options = request.reasoning or ReasoningOptions()
    effort = request.reasoning_effort or options.effort
    thinking = request.thinking
    if isinstance(thinking, dict):
        thinking = {"enabled": True, "disabled": False}.get(str(thinking.get("type")))
    for thinks in (request.enable_thinking, thinking, options.enabled):
        if thinks is not None:
            effort = None if effort == "none" else effort
            return (effort if thinks else "none"), thinks
    return effort, None if effort is None else effort != "none"


def chat_prompt(
    request: ChatRequest, dialect: Dialect, template: ChatTemplate | None
) -> tuple[ChatPrompt, ToolUse]:
    """The prompt of a chat before rendering, and its use of tools.

    Args:
        request: the body of the chat.
        dialect: the model's format of reasoning and tool calls.
        template: the model's chat template; None if there is none.

    Raises:
        ApiError: 400 if a message or tool is malformed, or fields contradict each other.
    """
    messages = chat_messages(
        request.messages,
        template,
        ids=dialect.call_ids,
        single_calls=dialect.has_single_calls,
    )
    use = tool_use(request, dialect, template)
    continues = continues_message(request)
    prompt = ChatPrompt(
        messages=messages,
        tools=use.tools,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continues=continues,
        template_arguments=template_arguments(request, template),
    )
    return prompt, use


def completion_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of /v1/completions: texts or token ids. Raises ApiError (400) for other types."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # in C: a prompt may have a million token ids
    if kinds == {int}:
        return [prompt]
    if kinds == {str}:
        return prompt
    if kinds == {list} and all(set(map(type, item)) <= {int} for item in prompt):
        return prompt
    raise bad_request(
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of "
        "token ids",
        "prompt",
    )


def _check_length(name: str, texts: Sequence[str] | None) -> None:
    num_characters = sum(map(len, texts or ()))
    if num_characters > MAX_STOP_CHARACTERS:
        raise bad_request(
            f"the texts in {name} have {num_characters} characters in total; the maximum is "
            f"{MAX_STOP_CHARACTERS}",
            name,
        )


def _check_num_allowed(request: CommonRequest, vocab_size: int) -> None:
    number = len(request.allowed_token_ids or ())
    if number > vocab_size:
        raise bad_request(
            f"allowed_token_ids has {number} tokens, but the vocabulary has {vocab_size}",
            "allowed_token_ids",
        )


def _diffusion(request: CommonRequest) -> DiffusionParams | None:
    if request.diffusion is None:
        return None
    names = DiffusionParams.__struct_fields__
    for name in request.diffusion:
        if name not in names:
            known = ", ".join(names)
            raise bad_request(
                f"unknown field {name!r} of diffusion: choose from {known}", "diffusion"
            )
    try:
        params = msgspec.convert(request.diffusion, analyzed(DiffusionParams))
    except msgspec.ValidationError as error:
        raise bad_request(f"diffusion: {error}", "diffusion") from error
    if params.stream_drafts and not request.stream:
        raise bad_request("diffusion.stream_drafts requires stream: true", "diffusion")
    return params
