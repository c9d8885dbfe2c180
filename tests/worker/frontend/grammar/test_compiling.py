"""The compiling process: what it accepts and rejects, and its limits."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.config import EngineConfig
from worker.core.grammar.base import GrammarError, GrammarTooHeavy
from worker.core.info import build_engine_info
from worker.frontend.grammar import process
from worker.frontend.grammar.process import CompilerFailure, GrammarCompiler, Setting, setting_of
from worker.niceness import COMPILER_NICENESS, RANK_NICENESS
from worker.plan.messages import Hello
from worker.protocol.messages import CompiledGrammar
from worker.protocol.structured import MAX_GRAMMAR_BYTES, StructuredOutputsParams

pytestmark = pytest.mark.slow

MODEL = "deploy/models/demo"
NESTED = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
}
SETTING = Setting(MODEL, 2560, [2], "auto")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(SETTING, 60.0)
    compile_with(compiler, regex="warm")
    yield compiler
    compiler.close()


def compile_with(compiler: GrammarCompiler, **params: Any) -> CompiledGrammar:
    return compiler.compile(StructuredOutputsParams(**params))


def test_the_vocabulary_comes_first(compiler: GrammarCompiler) -> None:
    vocabulary = compiler.vocabulary
    assert vocabulary is not None
    assert len(vocabulary.tokens) == 2560
    assert vocabulary.tokens[2] == b"", "an end token is no text"
    assert b"a" in vocabulary.tokens
    assert vocabulary.xgrammar


def test_a_key_stands_for_the_content(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first = compile_with(compiler, json=schema)
    assert first == compile_with(compiler, json=schema)
    keys = {
        first.key,
        compile_with(compiler, json=schema, disable_any_whitespace=True).key,
        compile_with(compiler, regex="a").key,
        compile_with(compiler, choice=["a"]).key,
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"regex": "(a"}, "parenthesis"),
        ({"regex": r"(a)\1"}, "[Bb]ackreference"),
        ({"grammar": "root ::= ("}, "EBNF"),
        ({"grammar": 'root ::= "a" foo'}, "foo"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= root"}, "no text matches"),
        ({"json": "{"}, "malformed"),
        ({"json": {"type": "record"}}, "record"),
        ({"json": {"$ref": "#/nope"}}, "nope"),
        ({"json": {"$ref": "#"}}, r"circular \$ref '#'"),
        ({"json": {"required": 5}}, "required"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": '{"properties":{"a":' * 9000 + "{}" + "}}" * 9000}, "malformed|recursion"),
        ({"structural_tag": {"x": 1}}, "triggers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_grammars_are_rejected_with_the_reason(
    compiler: GrammarCompiler, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as refusal:
        compile_with(compiler, **params)
    assert str(refusal.value).startswith("structured_outputs: ")
    assert "/project/" not in str(refusal.value), "no paths of a build machine"


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(a+)+$"},
        pytest.param({"regex": "(a+)+" * 50 + "$"}, marks=pytest.mark.long),
        {"regex": "(a*)*" * 50},
        pytest.param({"regex": "a{1,100000}"}, marks=pytest.mark.long),
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"grammar": 'root ::= s s s s\ns ::= s s | "a" | "aa" | ("a" s "a") | ""'},
        pytest.param({"json": {"type": "string", "maxLength": 100000}}, marks=pytest.mark.long),
        {"json": {"enum": [f"value {i}" for i in range(20000)]}},
        pytest.param(
            {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
            marks=pytest.mark.long,  # as `test_the_limit_is_cpu_time`
        ),
        {"json": NESTED},
    ],
    ids=lambda value: str(value)[:40],
)
def test_heavy_grammars_are_compiled_or_rejected_in_time(
    compiler: GrammarCompiler, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "seconds", 0.7)
    monkeypatch.setattr(process, "STARVED", 600)  # the machine may be busy
    began = time.monotonic()
    refusal = ""
    try:
        compile_with(compiler, **params)
    except GrammarError as error:
        refusal = str(error)
    assert not refusal or re.search("simplify|memory|ambiguous", refusal)
    assert time.monotonic() - began < 600.0  # without limits some would take hours
    monkeypatch.undo()
    assert compile_with(compiler, regex="[a-z]{3}").payload, "the next one is served"


def test_the_limit_is_cpu_time(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "seconds", 0.2)
    monkeypatch.setattr(process, "STARVED", 600)  # the machine may be busy
    heavy = {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    with pytest.raises(GrammarTooHeavy, match=r"longer than 0\.2 s to compile: simplify it"):
        compile_with(compiler, json=heavy)
    compile_with(compiler, regex="the next one is served")


def test_schemas_that_xgrammar_ignores_go_to_guidance(compiler: GrammarCompiler) -> None:
    both = {"type": "string", "pattern": "^a+$", "maxLength": 3}
    assert compile_with(compiler, json=both).backend == "guidance"
    assert compile_with(compiler, json={"type": "string"}).backend == "xgrammar"
    only = GrammarCompiler(Setting(MODEL, 2560, [2], "xgrammar"), 60.0)
    try:
        with pytest.raises(GrammarError, match="maxLength"):
            compile_with(only, json=both)
    finally:
        only.close()


def test_sizes_and_kinds_are_checked_before_anything_is_compiled() -> None:
    with pytest.raises(ValueError, match=str(MAX_GRAMMAR_BYTES)):
        StructuredOutputsParams(regex="a" * (MAX_GRAMMAR_BYTES + 1))
    with pytest.raises(ValueError, match=r"exactly one of .* got none"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match="got json and regex"):
        StructuredOutputsParams(json={}, regex="a")
    with pytest.raises(ValueError, match="choice"):
        StructuredOutputsParams(choice=())


def test_a_process_that_cannot_start_is_reported() -> None:
    compiler = GrammarCompiler(Setting("no/such-folder/here", 10, [2], "auto"))
    with pytest.raises(CompilerFailure):
        compile_with(compiler, regex="a")
    compiler.close()


def test_grammars_use_the_configured_tokenizer() -> None:
    hello = Hello(rank=0, num_pages=9, max_model_len=64, vocab_size=2560)
    for tokenizer, expected in (("", MODEL), ("other", "other")):
        config = EngineConfig.of(model=MODEL, tokenizer=tokenizer)
        assert config.tokenizer_checkpoint == expected
        assert setting_of(build_engine_info(config, [hello], "salt")).tokenizer == expected


def test_ranks_run_before_a_compiler(compiler: GrammarCompiler) -> None:
    assert compiler._process is not None
    pid = compiler._process.pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + COMPILER_NICENESS, 19)
    autogroups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if autogroups.exists() and autogroups.read_text().strip() == "1":
        assert os.getsid(pid) == pid
    assert COMPILER_NICENESS > RANK_NICENESS
