"""`make check-conformance`: common client libraries against the demo model on a real fleet.

The official clients of OpenAI and Anthropic validate all responses against their types; LangChain's
standard tests, LiteLLM, instructor and pydantic-ai run in a separate environment; Schemathesis
generates requests from the OpenAPI document; and streamed responses must equal whole ones. Clients
of vectors (OpenAI's, Cohere's, LangChain's, LlamaIndex') use the same model for embeddings. Each
omission has a reason in the report. Calls and output schemas are forced, since the model's choices
are not under test.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.launch import LocalFleet
from tests.campaigns.agents.model import model_with_tools
from tests.campaigns.checks import check_main, run_with_part_apart, serve_config
from tests.campaigns.conformance.cases import Endpoint, Outcome, outcomes_of, try_cases
from tests.campaigns.conformance.document import UNCHECKED, Report, try_document
from tests.campaigns.conformance.twins import try_twins
from tests.support.paths import ROOT

MODEL = "demo"
KEY = "conformance"
VECTORS = "vectors"
PARTS = ("official", "clients", "langchain", "twins", "document", VECTORS)
_PROGRAMS = "tests.campaigns.conformance"
_SHOWN_FAULTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceOptions:
    """Parts to run, and number of requests."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    clients: str = str(ROOT / "build" / "conformance")
    """Environment with the other clients, which `make check-conformance` creates."""
    parts: tuple[str, ...] = PARTS
    """Parts to run: official, clients, langchain, twins, document, vectors."""
    num_twins: int = 210
    """Number of requests that are sent both with and without streaming."""
    num_examples: int = 200
    """Maximum random requests that Schemathesis generates per operation, in addition to boundary
    values."""
    min_cases: int = 2000
    """Minimum number of cases that Schemathesis must run in total."""
    seed: int = 0
    """Seed of the random requests."""

    def __post_init__(self) -> None:
        unknown = set(self.parts) - set(PARTS)
        if unknown or not self.parts:
            raise ValueError(
                f"--parts must be from {', '.join(PARTS)}, got {', '.join(self.parts)}"
            )


def run_conformance(options: ConformanceOptions) -> Result:
    """Runs all parts, each against a fleet with one worker."""
    flags = [f"{_PROGRAMS}.main", "--clients", options.clients]
    flags += ["--model", options.model] if options.model else []
    return run_with_part_apart(_run_on_one_fleet, options, VECTORS, flags)


def _run_on_one_fleet(options: ConformanceOptions) -> Result:
    """Starts a fleet with one worker and runs the parts against it."""
    document = None
    with tempfile.TemporaryDirectory() as directory:
        model = str(model_with_tools(options.model, Path(directory)))
        engine = {"task": "embed"} if VECTORS in options.parts else {}
        with _serving(model, **engine) as endpoint:
            outcomes = list(_noted(_tried(options, endpoint)))
            document = _document(options, endpoint) if "document" in options.parts else None
    return {
        "passed": dict(Counter(_group(one) for one in outcomes if one.verdict == "passed")),
        "skipped": {one.name: one.text for one in outcomes if one.verdict == "skipped"},
        "faults": [f"{o.name}: {o.text}" for o in outcomes if o.verdict == "failed"][
            :_SHOWN_FAULTS
        ],
        "document": None if document is None else {**document._asdict(), "unchecked": UNCHECKED},
        "checks": checks_json(judge(outcomes, document, min_cases=options.min_cases)),
    }


@contextmanager
def _serving(model: str, **engine: Any) -> Iterator[Endpoint]:
    """A fleet with one worker; ends with the context."""
    config = serve_config(
        MODEL,
        model,
        max_num_seqs=8,
        kv_cache_tokens=8192,
        max_model_len=1024,
        batch_invariant=True,  # a seed gives the same answer regardless of the batch
        endpoint={"api_keys": (KEY,)},
        **engine,
    )
    with LocalFleet(config, report=note) as fleet:
        yield Endpoint(base_url=fleet.base_url, model=MODEL, key=KEY)


def _noted(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """The same outcomes; failures are printed when they occur."""
    for outcome in outcomes:
        if outcome.verdict == "failed":
            note(f"{outcome.name}: {outcome.text}")
        yield outcome


def judge(outcomes: Sequence[Outcome], document: Report | None, *, min_cases: int) -> list[Check]:
    """Checks of all outcomes; a group in which nothing passed fails."""
    checks = []
    for group in dict.fromkeys(map(_group, outcomes)):
        mine = [one for one in outcomes if _group(one) == group]
        failed = sum(one.verdict == "failed" for one in mine)
        passed = sum(one.verdict == "passed" for one in mine)
        unexplained = sum(one.verdict == "skipped" and not one.text for one in mine)
        checks += [
            exactly(f"{group}_failed", failed, "cases", 0),
            at_least(f"{group}_passed", passed, "cases", 1),
            exactly(f"{group}_skipped_without_a_reason", unexplained, "cases", 0),
        ]
    if document is not None:
        checks += [
            at_least("document_cases", document.num_cases, "cases", min_cases),
            at_least("document_accepted", document.accepted, "cases", 1),
            exactly("document_failed", sum(document.failures.values()), "cases", 0),
            exactly("document_errors", len(document.errors), "errors", 0),
        ]
    return checks


def _tried(options: ConformanceOptions, endpoint: Endpoint) -> Iterator[Outcome]:
    """Outcomes of all parts that consist of cases."""
    if "official" in options.parts:
        # Takes 3 s of CPU time, which test collection should not pay for.
        from tests.campaigns.conformance import anthropic_client, openai_client, openai_responses

        for group, module in (
            ("openai", openai_client),
            ("openai_responses", openai_responses),
            ("anthropic", anthropic_client),
        ):
            yield from try_cases(group, module.CASES, module.SKIPPED, endpoint)
    python = _program(options, "python")
    if "clients" in options.parts:
        yield from outcomes_of(python, f"{_PROGRAMS}.other_clients", endpoint)
    if "langchain" in options.parts:
        yield from outcomes_of(python, f"{_PROGRAMS}.langchain_standard", endpoint)
    if "twins" in options.parts:
        yield from try_twins(endpoint, num_requests=options.num_twins, seed=options.seed)
    if VECTORS in options.parts:
        yield from outcomes_of(python, f"{_PROGRAMS}.vector_clients", endpoint)


def _document(options: ConformanceOptions, endpoint: Endpoint) -> Report:
    program = _program(options, "schemathesis")
    return try_document(program, endpoint, num_examples=options.num_examples, seed=options.seed)


def _program(options: ConformanceOptions, name: str) -> Path:
    return Path(options.clients).resolve() / "bin" / name


def _group(outcome: Outcome) -> str:
    return outcome.name.partition(":")[0].lower()


if __name__ == "__main__":
    sys.exit(check_main(run_conformance, ConformanceOptions))
