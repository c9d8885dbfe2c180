"""/v1/decisions and /v1/systemone: probabilities of label tokens."""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.router.official_client import client_of
from tests.support.router.pooling_rig import EMBED
from tests.support.router.rig import CHATML, CORPUS, Rig, build_checkpoint
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

STATE = "The package arrived with a broken screen."
PREDICATE = {"type": "predicate", "name": "damaged", "instructions": "Is it damaged?"}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which team?"}],
    "choices": [{"value": "true", "description": "a word"}, {"value": True}, {"value": False}],
}
SCORE = {
    "type": "score",
    "name": "severity",
    "instructions": "How bad?",
    "levels": [{"label": "cosmetic"}, {"label": "broken", "description": "unusable"}],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A checkpoint whose vocabulary has the labels yes, no and Yes, but not No."""
    folder = tmp_path_factory.mktemp("words")
    build_checkpoint(folder, [*["yes\nno\nYes"] * 9, *CORPUS])
    return folder, load_tokenizer(str(folder))


@pytest.fixture
async def wordy(words: tuple[Path, Tokenizer]) -> AsyncIterator[Rig]:
    rig = Rig(*words)
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(worker.info, max_model_len=400)
    yield rig
    await rig.stop()


@asynccontextmanager
async def rig_of(words: tuple[Path, Tokenizer], folder: Path, template: str) -> AsyncIterator[Rig]:
    """A rig with another chat template."""
    shutil.copytree(words[0], folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    rig = Rig(folder, words[1])
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


def softmax(rig: Rig, options: Sequence[Sequence[str]]) -> tuple[list[float], float]:
    """Probabilities of options with these labels, and their sum, as the stub workers have them."""
    weights = [
        sum(math.exp(-0.1 * rig.tokenizer.encode(label)[0]) for label in labels)
        for labels in options
    ]
    return [weight / sum(weights) for weight in weights], sum(weights)


def prompts(rig: Rig) -> list[str]:
    return [
        rig.tokenizer.decode(memoryview(s.prompt).cast("i"), skip_special_tokens=False)
        for s in rig.submits()
    ]


async def test_the_official_client(wordy: Rig) -> None:
    await wordy.start()
    async with client_of(wordy) as client:
        found = await client.decisions.create(
            model="alias",
            input=STATE,
            questions=[PREDICATE, CHOICE, SCORE],
            safety_identifier="someone",
        )
    (first, second), mass = softmax(wordy, ["A", "B"])
    predicate, choice, score = found.answers
    assert found.model == "alias"
    assert predicate.type == "predicate"
    assert (predicate.name, predicate.probability) == ("damaged", pytest.approx(first))
    assert score.type == "score"
    assert score.score == pytest.approx(second)
    assert [(one.value, one.label) for one in score.probabilities] == [
        (0, "cosmetic"),
        (1, "broken"),
    ]
    assert score.confidence == pytest.approx(first * mass)
    assert choice.type == "choice"
    assert (choice.name, choice.choice) == (None, "true")
    assert [one.value for one in choice.probabilities] == ["true", True, False]
    expected = softmax(wordy, ["A", "B", "C"])[0]
    assert [one.probability for one in choice.probabilities] == pytest.approx(expected)
    number = sum(len(submit.prompt) // 4 for submit in wordy.submits())
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (number, 3, number + 3)


async def test_reads_of_a_long_state_share_a_worker(wordy: Rig) -> None:
    for worker in wordy.workers:
        worker.info = msgspec.structs.replace(
            worker.info, max_model_len=9000, max_total_tokens=99_000, max_num_seqs=64
        )
    await wordy.start()
    body = {"input": "hello world " * 2000, "questions": [PREDICATE, SCORE] * 4}
    response = await wordy.client.post("/v1/decisions", json=body)
    assert response.status_code == 200, response.text
    assert sorted(worker.num_submits for worker in wordy.workers) == [0, 8]


async def test_what_the_model_reads(wordy: Rig) -> None:
    await wordy.start()
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, "ö"]}}]},
    ]
    body = {"input": messages, "questions": [CHOICE], "model": "stub"}
    response = await wordy.client.post("/v1/decisions", json=body)
    assert response.status_code == 200, response.text
    [prompt] = prompts(wordy)
    assert prompt == (
        '<|im_start|>user\none\n\n{"a": [1, "ö"]}\n\nQuestion: Which team?\nA: "true" - a word\n'
        "B: true\nC: false\nReply with the letter of one option and nothing else.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    [submit] = wordy.submits()
    labels = sorted(wordy.tokenizer.encode(label)[0] for label in "ABC")
    assert submit.sampling.logprob_token_ids == tuple(labels)
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (1, 0.0)


async def test_systemone(wordy: Rig) -> None:
    await wordy.start()
    body = {
        "model": "stub",
        "state": {"ticket": "charged twice"},
        "instructions": "You sort tickets.",
        "questions": {
            "team": {
                "type": "choice",
                "instructions": "Which team?",
                "criteria": {"billing": "refunds", "shipping": None},
            },
            "urgent": {"type": "noul", "criteria": {"true": "the account is locked"}},
            "tone": {"type": "score", "criteria": ["calm", "annoyed", "furious"]},
        },
    }
    response = await wordy.client.post("/v1/systemone", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert (found["object"], found["model"]) == ("structured_decision", "stub")
    assert found["usage"] == {
        "input_tokens": sum(len(submit.prompt) // 4 for submit in wordy.submits()),
        "output_tokens": 3,
    }
    team, mass = softmax(wordy, ["A", "B"])
    assert found["answers"]["team"] == {
        "type": "choice",
        "choice": "billing",
        "probabilities": {"billing": pytest.approx(team[0]), "shipping": pytest.approx(team[1])},
        "confidence": pytest.approx(team[0] * mass),
    }
    assert found["diagnostics"]["team"]["label_mass"] == pytest.approx(mass)
    assert found["diagnostics"]["team"]["argmax_is_label"] is False
    (yes, no), _ = softmax(wordy, [["yes", "Yes"], ["no"]])
    assert found["answers"]["urgent"]["noul"] == pytest.approx(yes)
    assert found["answers"]["urgent"]["probabilities"] == pytest.approx({"yes": yes, "no": no})
    levels, _ = softmax(wordy, ["0", "1", "2"])
    tone = found["answers"]["tone"]
    assert tone["score"] == pytest.approx(levels[1] + 2 * levels[2])
    assert tone["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert list(tone["probabilities"].values()) == pytest.approx(levels)
    start = '<|im_start|>system\nYou sort tickets.<|im_end|>\n<|im_start|>user\n{"ticket": "charged'
    assert all(prompt.startswith(start) for prompt in prompts(wordy))
    assert any(
        "\nyes: the account is locked\nReply with yes or no" in one for one in prompts(wordy)
    )


async def test_argmax(wordy: Rig) -> None:
    label = wordy.tokenizer.encode("B")[0]
    for worker in wordy.workers:
        worker.script = lambda _: [label]
    await wordy.start()
    question = {"type": "choice", "criteria": {"a": None, "b": None}}
    body = {"state": "x", "questions": {"q": question}}
    found = (await wordy.client.post("/v1/systemone", json=body)).json()
    assert found["diagnostics"]["q"]["argmax_is_label"] is True


NOUL = {"type": "noul"}
ONE = {"state": "x", "questions": {"q": NOUL}}
ASKED = {"input": "x", "questions": [PREDICATE]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("decisions", {"questions": [PREDICATE]}, "input is missing"),
        ("decisions", {**ASKED, "questions": []}, "questions: Expected `array` of length >= 1"),
        ("decisions", {**ASKED, "questions": [PREDICATE] * 65}, "length <= 64"),
        ("decisions", {**ASKED, "input": []}, "at least one message"),
        ("decisions", {**ASKED, "input": [{"role": "system", "content": "x"}]}, "Invalid enum"),
        (
            "decisions",
            {**ASKED, "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "Invalid value 'input_image'",
        ),
        (
            "decisions",
            {**ASKED, "questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]},
            "must be distinct",
        ),
        (
            "decisions",
            {**ASKED, "questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(27)]}]},
            "length <= 26",
        ),
        ("decisions", {**ASKED, "input": "x" * 2000}, "maximum context length"),
        ("decisions", {**ASKED, "temperature": 1}, "unknown field temperature"),
        ("systemone", {**ONE, "questions": {"q": {**NOUL, "x": 1}}}, "unknown field `x`"),
        ("systemone", {**ONE, "questions": {"": NOUL}}, "must not be empty"),
        ("systemone", {**ONE, "questions": {"q": {"type": "score", "criteria": ["a"]}}}, "2 to 10"),
        ("systemone", {**ONE, "questions": {"q": {"type": "choice"}}}, "map 1 to 26 options"),
        ("systemone", {**ONE, "questions": {"q": {**NOUL, "criteria": {"no": ""}}}}, "true and"),
        (
            "systemone",
            {**ONE, "chat_template_kwargs": {"thinking": True}},
            "must not enable reasoning",
        ),
        ("systemone", {**ONE, "images": ["x"]}, "only text is supported"),
        (
            "systemone",
            {**ONE, "chat_template_kwargs": {"messages": []}},
            "must not contain messages",
        ),
    ],
)
async def test_invalid_requests(wordy: Rig, path: str, body: Any, message: str) -> None:
    await wordy.start()
    response = await wordy.client.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert not wordy.submits()


async def test_labels_must_be_single_tokens(rig: Rig) -> None:
    await rig.start()
    response = await rig.client.post("/v1/systemone", json=ONE)
    assert response.status_code == 400
    assert "label 'yes' is not a distinct single token" in response.json()["error"]["message"]
    response = await rig.client.post("/v1/decisions", json=ASKED)
    assert response.status_code == 200, response.text


async def test_models_without_labels(wordy: Rig) -> None:
    for worker in wordy.workers:
        worker.info = msgspec.structs.replace(worker.info, block_size=4)
    await wordy.start()
    response = await wordy.client.post("/v1/decisions", json=ASKED)
    assert response.status_code == 501
    assert "block-diffusion" in response.json()["error"]["message"]


async def test_models_with_vectors(wordy: Rig) -> None:
    for worker in wordy.workers:
        worker.info = msgspec.structs.replace(worker.info, pooling=EMBED)
    await wordy.start()
    response = await wordy.client.post("/v1/decisions", json=ASKED)
    assert response.status_code == 400
    assert "does not generate text" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("{{ '<think>' }}{# </think> #}", 501),
        ("{{ '<think>' }}{%- if not enable_thinking %}{{ '</think>' }}{%- endif %}", 200),
    ],
)
async def test_replies_must_not_start_with_reasoning(
    words: tuple[Path, Tokenizer], tmp_path: Path, end: str, status: int
) -> None:
    template = CHATML.replace("{%- if thinking %}{{ '<think>' }}{%- endif %}", end)
    async with rig_of(words, tmp_path, template) as rig:
        response = await rig.client.post("/v1/decisions", json=ASKED)
        assert response.status_code == status, response.text
        assert ("start with reasoning" in response.text) == (status == 501)
        assert all(prompt.endswith("<think></think>") for prompt in prompts(rig))


async def test_templates_without_special_tokens(
    words: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    """Labels have the same tokens after any message."""
    template = "{% for message in messages %}[INST] {{ message.content }} [/INST]{% endfor %}"
    async with rig_of(words, tmp_path, template) as rig:
        response = await rig.client.post("/v1/decisions", json=ASKED)
        assert response.status_code == 200, response.text
    async with rig_of(words, tmp_path, "{{ messages[0].content }}") as rig:
        response = await rig.client.post("/v1/decisions", json=ASKED)
        assert response.status_code == 400, response.text
        assert "depends on the message" in response.json()["error"]["message"]


async def test_keys_and_limits(wordy: Rig) -> None:
    await wordy.start(api_keys=("key",))
    for path, body in (("decisions", ASKED), ("systemone", ONE)):
        assert (await wordy.client.post(f"/v1/{path}", json=body)).status_code == 401
        headers = {"authorization": "Bearer key"}
        response = await wordy.client.post(f"/v1/{path}", json=body, headers=headers)
        assert response.status_code == 200, response.text
