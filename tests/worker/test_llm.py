"""Offline use: the engine in separate processes, text in and out, no Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.forked_rank import forking_ranks
from worker.core.executor import RankFailure
from worker.llm import LLM, PoolingParams, SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS = {"device": "cpu", "cpu_threads": 1, "kv_cache_tokens": 4096}


@pytest.fixture(scope="module")
def llm(tiny_chat_model: Path) -> Iterator[LLM]:
    with forking_ranks():  # ranks of other tests are started as usual
        llm = LLM(str(tiny_chat_model), **OPTIONS)
    with llm:
        yield llm


def rank_processes() -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "worker.rank.main"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in found.stdout.split()]


def test_texts_and_tokens_give_the_same_output(llm: LLM) -> None:
    text = "a prompt of a few words"
    by_text, by_tokens = llm.generate(
        [text, {"prompt_token_ids": llm.get_tokenizer().encode(text)}], GREEDY
    )
    assert by_text.prompt == text
    assert by_tokens.prompt is None
    assert by_text.prompt_token_ids == by_tokens.prompt_token_ids
    assert by_text.outputs[0].token_ids == by_tokens.outputs[0].token_ids
    assert len(by_text.outputs[0].token_ids) == 24
    assert by_text.outputs[0].finish_reason == "length"
    assert by_text.finished
    decoded = llm.get_tokenizer().decode(by_text.outputs[0].token_ids)
    assert by_text.outputs[0].text == decoded


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["one", "two", "three"], params)
    assert [output.prompt for output in outputs] == ["one", "two", "three"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]


def test_outputs_match_structured_outputs(llm: LLM) -> None:
    forms = [
        StructuredOutputsParams(regex="[a-c]{2}-[0-9]{3}"),
        StructuredOutputsParams(choice=["yes", "no"]),
    ]
    params = [
        SamplingParams(n=2, temperature=1.3, seed=3, structured_outputs=form) for form in forms
    ]
    by_regex, by_choice = llm.generate(["one", "two"], params)
    for output in by_regex.outputs:
        assert re.fullmatch("[a-c]{2}-[0-9]{3}", output.text)
        assert output.finish_reason == "stop"
    assert {output.text for output in by_choice.outputs} <= {"yes", "no"}
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(ValueError, match=r"prompt 1: structured_outputs: regex .* parenthesis"):
        llm.generate(["one", "two"], [GREEDY, broken])
    *_, last = llm.stream("three", params[0])
    assert last.finished


def test_choices_of_one_prompt_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    first, again = llm.generate(["x"], params)[0], llm.generate(["x"], params)[0]
    tokens = [output.token_ids for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert tokens == [output.token_ids for output in again.outputs]
    assert len({tuple(choice) for choice in tokens}) == 3


def test_streaming_grows_to_what_generate_returns(llm: LLM) -> None:
    lengths, text = [], ""
    for output in llm.stream("streamed", GREEDY):
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == list(range(1, 25))
    assert text == llm.generate("streamed", GREEDY)[0].outputs[0].text


def test_leaving_a_stream_frees_its_request(llm: LLM) -> None:
    for output in llm.stream("left early", SamplingParams(max_tokens=1000, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert llm.generate("after", GREEDY)[0].finished


@pytest.mark.parametrize("num_inner", [4, 32])
def test_a_stream_continues_between_other_calls(llm: LLM, num_inner: int) -> None:
    alone = llm.generate("a prompt of a few words", GREEDY)[0].outputs[0]
    stream = llm.stream("a prompt of a few words", GREEDY)
    assert len(next(stream).outputs[0].token_ids) == 1
    inner = SamplingParams(temperature=0.0, max_tokens=num_inner, ignore_eos=True)
    assert len(llm.generate("another one", inner)[0].outputs[0].token_ids) == num_inner
    left = llm.stream("a third", GREEDY)
    next(left)
    left.close()
    assert llm.generate("a fourth", inner)[0].finished
    *_, last = stream
    assert last.finished
    assert last.outputs[0].token_ids == alone.token_ids
    assert last.outputs[0].text == alone.text


def test_a_stop_string_ends_text_and_tokens(llm: LLM) -> None:
    free = llm.generate("stop here", GREEDY)[0].outputs[0]
    stop = free.text[6:9]
    output = llm.generate(
        "stop here", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,))
    )[0].outputs[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason == stop
    assert output.text == free.text[: free.text.index(stop)]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 24


def test_a_shared_prefix_is_cached(llm: LLM) -> None:
    prefix = list(range(40, 240))
    llm.generate([{"prompt_token_ids": [*prefix, 1]}], GREEDY)
    output = llm.generate([{"prompt_token_ids": [*prefix, 2]}], GREEDY)[0]
    assert output.num_cached_tokens == 192


def test_requests_that_never_fit_are_rejected_with_numbers(llm: LLM) -> None:
    with pytest.raises(ValueError, match="your prompt has 3000 tokens"):
        llm.generate([{"prompt_token_ids": [5] * 3000}], GREEDY)
    with pytest.raises(ValueError, match="which is out of range"):
        llm.generate([{"prompt_token_ids": [10**6]}], GREEDY)
    assert llm.generate("still works", GREEDY)[0].finished


def test_an_invalid_checkpoint_is_reported_and_leaves_no_process(tmp_path: Path) -> None:
    before = rank_processes()
    with forking_ranks(), pytest.raises(RankFailure, match="does not exist") as failure:
        LLM(str(tmp_path / "missing"), **OPTIONS)
    assert failure.value.heals, "the folder may be created later"
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RankFailure, match=r"config\.json is not valid JSON") as failure:
        LLM(str(tmp_path), **OPTIONS)
    assert not failure.value.heals
    assert rank_processes() == before


@pytest.mark.long  # tests/worker/core/test_local.py kills a rank of an engine
def test_a_killed_rank_is_named_and_the_rest_ends(tiny_chat_model: Path) -> None:
    before = rank_processes()
    llm = LLM(str(tiny_chat_model), tensor_parallel_size=2, **OPTIONS)
    mine = [pid for pid in rank_processes() if pid not in before]
    assert len(mine) == 2
    stream = llm.stream("killed", SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)
    os.kill(mine[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match="was killed by SIGKILL") as failure:
        list(stream)
    assert failure.value.heals
    assert rank_processes() == before
    with pytest.raises(ValueError, match="closed"):
        llm.generate("more", GREEDY)


def test_logprobs_have_vllms_format(llm: LLM) -> None:
    params = SamplingParams(
        n=2, seed=1, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    [output] = llm.generate(["logs"], params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    known = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(list(found) == [token] for token, found in known)
    for choice in output.outputs:
        assert choice.logprobs is not None
        own = [found[token] for token, found in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == sum(entry.logprob for entry in own)
        assert all(2 <= len(found) <= 3 for found in choice.logprobs)
        for found in choice.logprobs:
            assert {1, 2} <= {entry.rank for entry in found.values()}
    assert llm.generate(["logs"], GREEDY)[0].outputs[0].logprobs is None


def test_logprobs_end_with_the_text(llm: LLM) -> None:
    free = llm.generate("stop here", GREEDY)[0].outputs[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, stop=(free.text[6:9],), logprobs=1
    )
    [output] = llm.generate("stop here", params)[0].outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) < 24
    decoded = [f[t].decoded_token for t, f in zip(output.token_ids, output.logprobs, strict=True)]
    assert free.text.startswith("".join(str(piece) for piece in decoded))


def test_bad_words_and_biases_by_text(llm: LLM) -> None:
    free = llm.generate("words", GREEDY)[0].outputs[0].text
    bad = free[3:5]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, bad_words=bad)
    text = llm.generate("words", params)[0].outputs[0].text
    assert bad not in text
    assert text[:1] == free[:1]
    only = SamplingParams(max_tokens=4, ignore_eos=True, allowed_token_ids=[40, 41])
    assert set(llm.generate("words", only)[0].outputs[0].token_ids) <= {40, 41}
    biased = SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={50: 1000.0})
    assert llm.generate("words", biased)[0].outputs[0].token_ids == [50] * 4
    with pytest.raises(ValueError, match="logit_bias has token id 100000"):
        llm.generate("words", SamplingParams(logit_bias={100000: 1.0}))


def test_vectors_of_a_pooling_model(tiny_chat_model: Path) -> None:
    with forking_ranks():
        model = LLM(str(tiny_chat_model), task="embed", **OPTIONS)
    with model:
        one, two = model.encode(["a prompt of a few words", "another"])
        (short,) = model.encode(["another"], PoolingParams(dimensions=8))
        with pytest.raises(ValueError, match="this model does not generate text"):
            model.generate(["x"], GREEDY)
    assert one.prompt_token_ids != two.prompt_token_ids
    assert len(one.outputs.data) == len(two.outputs.data) > len(short.outputs.data) == 8
    assert float(one.outputs.data @ one.outputs.data) == pytest.approx(1.0)
