"""No field of a body is silently ignored: it is supported, known to have no effect, or rejected."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.openai.fields import IGNORED, REFUSED
from router.api.openai.protocol import ChatRequest, CompletionRequest
from worker.protocol.text.chat_template import ChatTemplate

CHAT = set(ChatRequest.__struct_fields__)
TEXT = set(CompletionRequest.__struct_fields__)
VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo ignore_eos include_reasoning
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids
    logits_processors media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_embeds
    prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids session_id
    skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval
    structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side
    use_beam_search vllm_xargs guided_json guided_regex guided_choice guided_grammar
"""
SGLANG = """
    best_of bootstrap_host bootstrap_port bootstrap_room custom_labels custom_logit_processor
    custom_params data_parallel_rank ebnf echo extra_key input_ids json_schema lora_path
    no_stop_trim regex return_hidden_states rid separate_reasoning session_params stop_regex
    stream_reasoning
"""
STRANGE = {"surely": ["not", "harmless"]}


def test_every_field_of_peers_is_known() -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    fields = {
        *chat_create_params.CompletionCreateParamsStreaming.__annotations__,
        *completion_create_params.CompletionCreateParamsStreaming.__annotations__,
        *VLLM.split(),
        *SGLANG.split(),
    }
    assert fields - CHAT - TEXT - IGNORED - set(REFUSED) == set()


def test_a_field_is_known_as_one_thing() -> None:
    assert not IGNORED & (CHAT | TEXT | set(REFUSED))
    assert not set(REFUSED) & CHAT & TEXT, "served by both routes"
    assert set(REFUSED) >= CHAT ^ TEXT, "what one route serves, the other refuses"


async def test_unsupported_fields_are_named_in_the_error(rig: Any) -> None:
    await rig.start()
    for name, refused in REFUSED.items():
        for call, served in ((rig.chat, CHAT), (rig.complete, TEXT)):
            if name in served:
                continue
            response = await call(**{name: STRANGE})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert refused.instead in error["message"]
    assert rig.submits() == []


async def test_values_that_change_nothing_pass(rig: Any) -> None:
    await rig.start()
    ignored = dict.fromkeys(sorted(IGNORED), STRANGE)
    for call, served in ((rig.chat, CHAT), (rig.complete, TEXT)):
        refused = {name: entry for name, entry in REFUSED.items() if name not in served}
        nulls = dict.fromkeys(sorted(set(refused) - {"prompt"}))
        assert (await call(**ignored, **nulls, unknown_field=None)).status_code == 200
        for name, entry in refused.items():
            for value in entry.harmless:
                response = await call(**{name: value})
                assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temperatures", "temperature"),
        ("max_token", "max_tokens"),
        ("topp", "top_p"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("toolz", None),
        ("x" * 10_000, None),
    ],
)
async def test_names_that_nobody_knows_are_refused(rig: Any, name: str, meant: str | None) -> None:
    await rig.start()
    response = await rig.complete(**{name: 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name[:64])
    assert (f"did you mean {meant}?" if meant else "omit it") in error["message"]
    assert len(error["message"]) < 200


async def test_options_of_a_stream_are_fields_as_well(rig: Any) -> None:
    await rig.start()
    response = await rig.chat(stream=True, stream_options={"include_usage": True, "usages": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"
    assert "usages" in response.json()["error"]["message"]
    options = {"include_obfuscation": False}
    assert (await rig.chat(stream=True, stream_options=options)).status_code == 200


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function"}])
async def test_a_choice_of_tools_needs_tools(rig: Any, choice: object) -> None:
    await rig.start()
    response = await rig.chat(tool_choice=choice)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tool_choice")
    assert (await rig.chat(tool_choice="none")).status_code == 200


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_effort_reaches_the_template(rig: Any, effort: str) -> None:
    """The rig's template only reads `thinking`."""
    await rig.start()
    assert (await rig.chat(reasoning_effort=effort)).status_code == 200
    prompt = memoryview(rig.submits()[0].prompt).cast("i").tolist()
    assert rig.tokenizer.decode(prompt).endswith("<think>") == (effort != "none")


async def test_effort_is_refused_where_nothing_reads_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start()
    assert (await rig.chat(reasoning_effort="maximal")).status_code == 400
    template = ChatTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr(rig.gateway.model("stub").tokenizer, "_template", template)
    response = await rig.chat(reasoning_effort="high")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")
    assert (await rig.chat(reasoning_effort="none")).status_code == 200


async def test_the_client_decides_what_it_names_itself(rig: Any) -> None:
    await rig.start()
    named = {"chat_template_kwargs": {"thinking": False}}
    assert (await rig.chat(reasoning_effort="high", **named)).status_code == 200
    prompt = memoryview(rig.submits()[0].prompt).cast("i").tolist()
    assert not rig.tokenizer.decode(prompt).endswith("<think>")
