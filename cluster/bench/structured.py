"""`rayfleet bench structured`: what constrained decoding costs, by kind of grammar.

One engine, as `LLM` has it, takes turns: a number of requests under a grammar, and as many free
ones of the same lengths. Lengths are equal because draws are seeded: the first turn tells them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import msgspec

from cluster.bench.alternate import alternate
from cluster.bench.decode import DecodeEngine
from cluster.bench.report import Check, Result, at_least, checks_json, note
from cluster.bench.stats import percentile, ratios, spread_of_ratios
from worker.config import EngineConfig
from worker.front.grammar.process import GrammarCompiler, setting_of
from worker.wire.messages import CompiledGrammar
from worker.wire.sampling import SamplingParams
from worker.wire.structured import StructuredOutputsParams

LEAST_RATIO = 0.95
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "visits": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 4,
            "maxItems": 8,
        },
    },
    "required": ["name", "age", "visits"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=json.dumps(_RECORD)),
    "regex": StructuredOutputsParams(regex=r"(\d{4}-\d{2}-\d{2} [a-f0-9]{8}\n){4,8}"),
    "choice": StructuredOutputsParams(
        choice=tuple(f"the {word} of the town of {word} by the sea" for word in ("owl", "hen"))
    ),
    "grammar": StructuredOutputsParams(
        grammar='root ::= term (" + " term){9,15}\n'
        'term ::= [1-9] [0-9]{0,3} | "(" term " * " term ")"'
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOptions:
    """What runs; `engine.max_num_seqs` is set by the benchmark."""

    engine: EngineConfig
    streams: int = 16
    pairs: int = 10
    max_tokens: int = 128
    input_len: int = 32

    def __post_init__(self) -> None:
        if min(self.streams, self.pairs, self.max_tokens, self.input_len) < 1:
            raise ValueError("--streams, --pairs, --max-tokens and --input-len must be at least 1")


def run_structured(options: StructuredOptions) -> Result:
    """Measures every kind of grammar against free requests of the same lengths."""
    config = replace(options.engine, max_num_seqs=options.streams)
    result: Result = {"model": config.model, "streams": options.streams, "pairs": options.pairs}
    checks: list[Check] = []
    with DecodeEngine(config, steps=options.max_tokens, input_len=options.input_len) as engine:
        compiler = GrammarCompiler(setting_of(engine.info), 60.0)
        try:
            for kind, params in GRAMMARS.items():
                figures = _measure(options, engine, compiler, params)
                result[kind] = figures
                checks.append(at_least(f"ratio_{kind}", figures["ratio"], "", LEAST_RATIO))
                note(f"{kind}: {figures['ratio']:.3f} times the speed of free requests")
        finally:
            compiler.close()
    return {**result, "checks": checks_json(checks)}


def _measure(
    options: StructuredOptions,
    engine: DecodeEngine,
    compiler: GrammarCompiler,
    params: StructuredOutputsParams,
) -> Result:
    compiled = compiler.compile(params)
    bound = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)
    constrained = [
        msgspec.structs.replace(bound, seed=seed, structured_outputs=params)
        for seed in range(options.streams)
    ]
    assert compiler.vocabulary is not None, "there from the first grammar on"
    engine.learn(compiler.vocabulary, compiled)
    lengths, _ = engine.complete(constrained, compiled.key)
    free = [
        msgspec.structs.replace(bound, seed=seed, max_tokens=length, ignore_eos=True)
        for seed, length in enumerate(lengths)
    ]
    arms = {
        "constrained": partial(_speed, engine, constrained, compiled),
        "free": partial(_speed, engine, free, None),
    }
    alternate(arms, 1)  # warms up
    speeds = alternate(arms, options.pairs)
    gains = ratios(speeds["constrained"], speeds["free"])
    return {
        "ratio": percentile(gains, 50.0),
        "spread": asdict(spread_of_ratios(gains)),
        "tokens": sum(lengths),
        "constrained_tokens_per_second": percentile(speeds["constrained"], 50.0),
        "free_tokens_per_second": percentile(speeds["free"], 50.0),
    }


def _speed(
    engine: DecodeEngine,
    params: Sequence[SamplingParams],
    compiled: CompiledGrammar | None,
    number: int,
) -> float:
    """Tokens per second of one turn; `number` counts the turns and changes nothing."""
    lengths, seconds = engine.complete(params, "" if compiled is None else compiled.key)
    return sum(lengths) / seconds
