"""Tool loops of clients through a gateway with the demo's template; the model is scripted."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from deploy.models.tokenizer import TOOL_TEMPLATE
from tests.campaigns.agents.loops import LOOPS
from tests.campaigns.agents.world import Question, made, random_question
from tests.support.effort import IS_LONG
from tests.support.paths import DEMO
from tests.support.router.agent import agent_rig
from tests.support.router.rig import Rig
from worker.protocol.messages import Submit
from worker.protocol.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.randomized  # with more questions
END = 2
OFFICIAL = ("openai", "openai_streamed", "anthropic", "responses")
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer with the template that includes functions."""
    folder = tmp_path_factory.mktemp("demo")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    rig = agent_rig(folder, load_tokenizer(str(folder)))
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(worker.info, vocab_size=rig.tokenizer.vocab_size)
    await rig.start()
    yield rig
    await rig.stop()


def questions() -> list[Question]:
    """Some questions of each kind: one and two calls, failing ones, none."""
    rng = random.Random(1)
    return list(
        {
            entry.question: entry
            for entry in (random_question(rng) for _ in range(16 if IS_LONG else 5))
        }.values()
    )


def asked_of(rig: Rig, submit: Submit) -> str:
    """The last user turn, as rendered for the model."""
    ids = memoryview(submit.prompt).cast("i").tolist()
    prompt = rig.tokenizer.decode(ids, skip_special_tokens=False)
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def play(rig: Rig, known: list[Question], *, opening: str = "<tool_call>\n") -> None:
    """Scripts the model to make the calls that each question needs, and to report the results."""

    def script(submit: Submit) -> list[int]:
        last = asked_of(rig, submit)
        results = RESULT.findall(last)
        calls = [call for entry in known if entry.question == last for call in entry.calls]
        if results:
            output = "Told: " + ", ".join(results)
        elif calls:
            bodies = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
            output = "\n".join(f"{opening}{body}\n</tool_call>" for body in bodies)
        else:
            output = "Nothing to call."
        return [*rig.tokenizer.encode(output), END]

    for worker in rig.workers:
        worker.script = script


@pytest.mark.parametrize("name", OFFICIAL)
async def test_a_loop_makes_the_calls_and_brings_the_results(rig: Rig, name: str) -> None:
    known = questions()
    assert {len(entry.calls) for entry in known} == {0, 1, 2}
    play(rig, known)
    async with rig.server() as url:
        for entry in known:
            run = await asyncio.to_thread(LOOPS[name], url, "stub", entry.question, False)
            assert run.faults == []
            assert run.calls == list(entry.calls)
            results = [made(*call) for call in entry.calls]
            # Anthropic's clients mark failed calls.
            marked = name == "anthropic"
            reported = [f"Error: {text}" if marked and failed else text for text, failed in results]
            assert run.answer == (
                f"Told: {', '.join(reported)}" if reported else "Nothing to call."
            )


@pytest.mark.parametrize("name", OFFICIAL)
async def test_malformed_calls_are_text_and_no_fault(rig: Rig, name: str) -> None:
    known = [entry for entry in questions() if entry.calls][:1]
    play(rig, known, opening="<tool_call>\n{")
    async with rig.server() as url:
        run = await asyncio.to_thread(LOOPS[name], url, "stub", known[0].question, False)
    assert (run.faults, run.calls) == ([], [])
    assert "<tool_call>" in (run.answer or "")
