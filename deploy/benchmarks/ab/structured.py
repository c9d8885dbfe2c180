"""Benchmark `structured`: cost of constrained decoding by kind of grammar.

One engine alternates between requests with a grammar and the same number of unconstrained requests
of the same lengths. The lengths come from a first run; seeded sampling reproduces them.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict

import msgspec

from cluster.bench.report import Check, Result, checks_json, note
from cluster.bench.turns import take_turns
from deploy.benchmarks.ab.options import StructuredOptions
from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.engine import BenchEngine, Request, random_prompt
from worker.frontend.grammar.process import GrammarCompiler, setting_of
from worker.protocol.messages import SubmitBatch
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

_PRESET = PRESETS["structured"]
_COMPILE_S = 60.0
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


def run(options: StructuredOptions) -> Result:
    """Measures each kind of grammar against unconstrained requests of the same lengths."""
    config = options.engine.with_options(max_num_seqs=options.streams)
    result: Result = {"model": config.model, "streams": options.streams, "pairs": options.pairs}
    checks: list[Check] = []
    tokens = options.input_len + 2 * options.max_tokens + 64
    with (
        BenchEngine(config, request_tokens=tokens) as engine,
        closing(GrammarCompiler(setting_of(engine.info), _COMPILE_S)) as compiler,
    ):
        for kind, params in GRAMMARS.items():
            result[kind] = figures = _measure(options, engine, compiler, params)
            checks += _PRESET.checks({f"ratio_{kind}": figures["ratio"]})
            note(f"{kind}: {figures['ratio']:.3f} times the speed of unconstrained requests")
    return {**result, "checks": checks_json(checks)}


def _measure(
    options: StructuredOptions,
    engine: BenchEngine,
    compiler: GrammarCompiler,
    params: StructuredOutputsParams,
) -> Result:
    grammar = compiler.compile(params)
    assert compiler.vocabulary is not None, "there from the first grammar on"
    # The message that a worker's frontend sends to its engine.
    engine.core.receive(SubmitBatch(vocabulary=compiler.vocabulary, grammars=[grammar]))
    prompts = [
        random_prompt((0, index), engine.info.vocab_size, options.input_len)
        for index in range(options.streams)
    ]
    bound = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)
    constrained = [
        Request(
            prompt,
            msgspec.structs.replace(bound, seed=seed, structured_outputs=params),
            grammar=grammar.key,
        )
        for seed, prompt in enumerate(prompts)
    ]
    lengths = [len(answer.token_ids) for answer in engine.run(constrained).answers]
    free = [
        Request(
            prompt, msgspec.structs.replace(bound, seed=seed, max_tokens=length, ignore_eos=True)
        )
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    turns = take_turns(
        {
            "constrained": lambda number: engine.run(constrained).tokens_per_second,
            "free": lambda number: engine.run(free).tokens_per_second,
        },
        options.pairs,
        warmups=1,
    )
    ratio = turns.ratio("constrained", "free", float)
    return {
        "ratio": ratio.median,
        "spread": asdict(ratio),
        "tokens": sum(lengths),
        "constrained_tokens_per_second": turns.median("constrained", float),
        "free_tokens_per_second": turns.median("free", float),
    }
