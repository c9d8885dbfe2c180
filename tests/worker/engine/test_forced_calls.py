"""Tool calls forced by a grammar: any model generates them, trained for it or not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest

from router.parsers import FORMATS, Call, CallArguments, OutputParser
from tests.support.effort import cases
from tests.support.paths import ROOT
from worker.llm import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.slow
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Bern", "Zürich", 'the "Alps"']},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
PROPERTIES = {name: schema["properties"] for name, schema in SCHEMAS.items()}
FORCED = sorted(name for name, made in FORMATS.items() if made.before)
SEEDS = range(cases(25))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = str(ROOT / "deploy" / "models" / "demo")
    with LLM(model, device="cpu", cpu_threads=1, kv_cache_tokens=8192) as llm:
        yield llm


def test_forced_calls_are_calls(llm: LLM) -> None:
    pairs = [(name, seed) for name in FORCED for seed in SEEDS]
    params = [
        SamplingParams(
            max_tokens=250,
            seed=seed,
            temperature=(0.0, 1.0, 1.3)[seed % 3],
            structured_outputs=StructuredOutputsParams(
                structural_tag=FORMATS[name].calls_tag(SCHEMAS, single_call=True)
            ),
        )
        for name, seed in pairs
    ]
    questions = ("What is the weather?", "now()")
    outputs = llm.generate([questions[seed % 2] for _, seed in pairs], params)
    called = set()
    for (name, seed), output in zip(pairs, outputs, strict=True):
        [completion] = output.outputs
        parser = OutputParser(
            thoughts=None, is_thinking=False, tools=FORMATS[name], properties=PROPERTIES
        )
        pieces = parser.push(completion.text) + parser.end()
        assert completion.finish_reason == "stop", (name, seed, completion.text)
        assert [type(piece) for piece in pieces] == [Call, CallArguments], completion.text
        call, arguments = pieces
        assert isinstance(call, Call)
        assert isinstance(arguments, CallArguments)
        jsonschema.validate(json.loads(arguments.text), SCHEMAS[call.name])
        called.add((name, call.name))
    assert {name for _, name in called} == set(SCHEMAS)
