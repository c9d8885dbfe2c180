"""Prompts, arrivals and parsing of streams."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from cluster.bench.arrivals import arrival_times
from cluster.bench.client import Record, Request, open_session, send
from cluster.bench.datasets import DatasetOptions, make_samples
from cluster.bench.load import Load, choose_processes, split_load
from cluster.bench.prompts import PromptSpace
from cluster.bench.sse import EventScanner, has_choices, has_text, has_usage, opens_chat
from tests.support.cluster.openai_backend import Backend

VOCABULARY = np.arange(10, 500)


def test_random_prompts_have_exact_lengths_and_a_seed() -> None:
    options = DatasetOptions(random_input_len=17, random_output_len=5, random_prefix_len=3)
    samples = make_samples(options, 6, VOCABULARY, seed=1)
    assert [len(s.prompt_token_ids) for s in samples] == [20] * 6
    assert {s.output_len for s in samples} == {5}
    assert len({tuple(s.prompt_token_ids[:3]) for s in samples}) == 1
    assert len({tuple(s.prompt_token_ids) for s in samples}) == 6
    assert samples == make_samples(options, 6, VOCABULARY, seed=1)
    assert samples != make_samples(options, 6, VOCABULARY, seed=2)


def test_range_ratio_limits_lengths() -> None:
    options = DatasetOptions(random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    samples = make_samples(options, 200, VOCABULARY, seed=0)
    assert {50 <= len(s.prompt_token_ids) <= 150 for s in samples} == {True}
    assert {s.output_len for s in samples} == set(range(5, 16))


def test_prefix_repetition_shares_prefixes_evenly() -> None:
    options = DatasetOptions(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=2,
    )
    samples = make_samples(options, 12, VOCABULARY, seed=0)
    prefixes = [tuple(s.prompt_token_ids[:8]) for s in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert {len(s.prompt_token_ids) for s in samples} == {12}


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 8.0])
def test_arrivals_keep_the_rate(burstiness: float) -> None:
    times = arrival_times(50, 10.0, burstiness, seed=4)
    assert times[-1] == pytest.approx(5.0)
    assert all(a <= b for a, b in pairwise(times))
    assert times == arrival_times(50, 10.0, burstiness, seed=4)


def test_infinite_burstiness_gives_equal_intervals() -> None:
    assert arrival_times(4, 2.0, math.inf, seed=4) == [0.5, 1.0, 1.5, 2.0]


def test_infinite_rate_sends_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="must be greater than 0"):
        arrival_times(3, 0.0, 1.0, seed=0)


def test_scanner_joins_chunks_and_drops_comments() -> None:
    scanner = EventScanner()
    assert scanner.feed(b'data: {"a":') == []
    assert scanner.feed(b"1}\n\n: ping\n\ndata: x\r\n\r\ndata: [DO") == [b'{"a":1}', b"x"]
    assert scanner.feed(b"NE]\n\n") == [b"[DONE]"]
    assert scanner.feed(b"event: e\ndata: one\ndata: two\n\n") == [b"one\ntwo"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"choices":[{"text":" a"}],"usage":null}', "choices text"),
        (b'{"choices":[{"text": ""}]}', "choices"),
        (b'{"choices": [ {"delta":{"role": "assistant","content":""}}]}', "choices opens"),
        (b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', "choices text"),
        (b'{"choices":[{"delta":{"content":"\\n"}}]}', "choices text"),
        (b'{"choices":[{"delta":{"reasoning_content":"x","content":null}}]}', "choices text"),
        (b'{"choices":[{"text":"\\"usage\\":{\\"text\\":"}]}', "choices text"),
        (b'{"choices":[],"usage":{"prompt_tokens":1}}', "usage"),
    ],
)
def test_events_are_classified_without_decoding(data: bytes, message: str) -> None:
    tests = {"choices": has_choices, "text": has_text, "usage": has_usage, "opens": opens_chat}
    assert {name for name, test in tests.items() if test(data)} == set(message.split())


async def send_request(backend: Backend, endpoint: str, body: dict[str, object]) -> Record:
    request = Request(index=0, body=json.dumps(body).encode(), prompt_len=2, output_len=3)
    async with open_session({}) as session:
        return await send(session, backend.url + endpoint, request)


@pytest.mark.parametrize(
    ("endpoint", "prompt"),
    [
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}]}),
    ],
)
async def test_latency_ends_with_the_last_event_with_choices(
    backend: Backend, endpoint: str, prompt: dict[str, object]
) -> None:
    """As in vLLM's benchmark: three tokens, one without text, and the finish reason."""
    backend.pace_s = 0.01
    backend.empty = 1
    record = await send_request(backend, endpoint, {**prompt, "max_tokens": 3})
    assert not record.error
    assert (record.output_len, len(record.itl)) == (3, 3)
    assert record.latency == pytest.approx(record.ttft + sum(record.itl)), "no end of the stream"
    if "messages" in prompt:
        assert record.ttft >= 0.01, "the chunk with the role alone came before"


def test_processes_follow_the_load() -> None:
    assert choose_processes(1000, 128, 32, math.inf) == 1
    assert choose_processes(1000, 128, None, math.inf) >= 1
    assert choose_processes(1, 128, 100_000, 1e9) == 1


def test_dependent_requests_cannot_be_split() -> None:
    requests = tuple(
        Request(index=place, body=b"", prompt_len=1, output_len=1, after=place - 1 or None)
        for place in (1, 2)
    )
    load = Load(url="", headers={}, requests=requests, max_concurrency=None)
    with pytest.raises(ValueError, match="split between clients"):
        split_load(load, 2)


def test_text_prompts_fit_their_length(tmp_path: Path) -> None:
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 300)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    space = PromptSpace.load(str(tmp_path))
    assert 300 not in space.vocabulary.tolist()
    assert len(tokenizer.encode(space.as_text([5, 9, 250])).ids) == 3
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        PromptSpace.load(str(tmp_path / "nowhere"))
