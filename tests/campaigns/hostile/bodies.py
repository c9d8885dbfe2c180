"""Bodies that no client should send, drawn by hypothesis: for gateways in tests, and for fleets."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

numbers = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**400]),
    st.floats(-2, 2),
    st.sampled_from([0.0, 1e-320, 1e-30, 1e-6, 1.0, 1e30, 1e308, float("nan"), float("inf")]),
)
texts = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "hi", "\ud800", "a\udfffb", "\0", "🙂"])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
token_ids = st.lists(st.one_of(st.integers(-2, 1002), numbers, st.booleans()), max_size=4)
_SLO = st.dictionaries(st.sampled_from(["ttft_ms", "tpot_ms", "e2e_ms", "x"]), numbers, max_size=3)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "stream_options": st.sampled_from([{}, {"include_usage": True}, {"include_usage": None}]),
    "n": st.integers(-1, 3) | numbers,
    "max_tokens": numbers,
    "max_completion_tokens": numbers,
    "temperature": numbers,
    "top_p": numbers,
    "top_k": numbers,
    "min_p": numbers,
    "min_tokens": numbers,
    "seed": numbers,
    "stop": texts | st.lists(texts, max_size=6),
    "stop_token_ids": token_ids,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "truncate_prompt_tokens": numbers,
    "cache_salt": texts,
    "priority": numbers,
    "add_special_tokens": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["thinking", "self", "bos_token", "messages", "strftime_now", "x y"]),
        anything,
        max_size=2,
    ),
    "response_format": anything,
    "structured_outputs": anything,
    "diffusion": anything,
    "slo": _SLO,
    "user": texts,
    "prompt_cache_key": texts,
    "tools": anything,
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | anything,
    "parallel_tool_calls": st.booleans(),
    "continue_final_message": st.booleans(),
    "documents": st.lists(st.dictionaries(texts, anything, max_size=2), max_size=2) | anything,
    "include_reasoning": st.booleans(),
    "thinking_token_budget": st.integers(-1, 100),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "enable_thinking": st.booleans() | scalars,
    "thinking": st.booleans() | st.dictionaries(st.just("type"), anything, max_size=1),
    "reasoning": st.dictionaries(
        st.sampled_from(["effort", "enabled", "exclude", "max_tokens"]),
        st.sampled_from(["none", "low"]) | scalars,
        max_size=3,
    ),
    "logprobs": scalars | numbers | st.booleans(),
    "top_logprobs": numbers,
    "prompt_logprobs": numbers,
    "echo": st.booleans(),
    "frequency_penalty": numbers,
    "presence_penalty": numbers,
    "repetition_penalty": numbers,
    "logit_bias": st.dictionaries(texts | st.integers(-2, 2000).map(str), numbers, max_size=3),
    "bad_words": st.lists(texts, max_size=4),
    "allowed_token_ids": token_ids,
}
prompts = st.one_of(texts, token_ids, st.lists(st.one_of(texts, token_ids), max_size=3), anything)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x", None, 3])},
        optional={
            "content": texts | st.just([{"type": "text", "text": "a"}]) | anything,
            "name": anything,
        },
    ),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn, models: tuple[object, ...]) -> tuple[str, dict[str, Any]]:
    """Mostly sound requests with a few fields that may be anything; a route, and a body.

    `models` are values of the field that names one.
    """
    fields = {**FIELDS, "model": st.sampled_from(models)}
    chat = draw(st.booleans())
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if not chat:
        body = {"prompt": "hi"}
    if draw(st.integers(0, 2)) == 0:
        body = {"messages": draw(messages)} if chat else {"prompt": draw(prompts)}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)):
        body[name] = draw(anything if draw(st.integers(0, 5)) == 0 else fields[name])
    return ("/v1/chat/completions" if chat else "/v1/completions"), body
