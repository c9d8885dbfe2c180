"""`make check-mixtures`: random mixtures of requests in engines with random options and with drafts
from n-grams, a draft model, an MTP head or an EAGLE-3 head.

Tokens and log-probabilities must equal those of each request alone, and no request, page or state
may remain. test_heads.py and test_state_drafts.py run a few mixtures in every test run.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.cli.parser import CommandParser
from tests.support.checkpoints.eagle import write_predicting
from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.mtp import HEADS, write_with_head
from tests.support.engines.mixtures import Case, Mixture, cases_of, drafting_engine
from tests.support.engines.oracle_drafts import OracleDrafts

NUM_MIXTURES = 20_000
NUM_CASES = 32
PER_ENGINE = 10
"""Number of mixtures per engine; later mixtures find cached prefixes of earlier ones."""
PAGE = 8
METHODS = ("mtp", "eagle3", "ngram", "draft")
NO_DRAFT_MODELS = ("mimo-v2",)
"""Checkpoints that do not support draft models (`preflight.check_windows`)."""
DRAFT_FOR_THEMSELVES = ("mimo", "qwen3")
"""Checkpoints that the compiled library supports, so that they can draft on CPU. Others use another
draft model, which is rarely right."""


@dataclass(frozen=True)
class Run:
    """Mixtures of one engine."""

    name: str
    """Checkpoint, and number of the first mixture."""
    method: str
    options: dict[str, Any]
    num_mixtures: int
    counts: Counter[str]
    """Numbers of drafts, accepted drafts, requests that continued cached prefixes, and
    preemptions."""
    differences: list[str]


def options_of(rng: random.Random, method: str, draft: Path) -> dict[str, Any]:
    """Random options of an engine that drafts with a given method."""
    options: dict[str, Any] = {
        "speculative_method": method,
        "speculative_adaptive": False,
        "num_speculative_tokens": rng.choice((1, 2, 3, 7)),
        "overlap_depth": rng.choice((0, 1, 1)),
        "on_device": rng.random() < 0.4,
        "page_size": PAGE,
    }
    if method == "eagle3":
        options |= {"speculative_model": str(draft)}
    if method == "draft":
        options |= {"speculative_model": str(draft), "page_size": 2 * PAGE}
    if rng.random() < 0.5:  # scarce pages, short chunks
        factor = 2 if method == "draft" else 1
        options |= {"kv_cache_tokens": rng.choice((256, 320, 400)) * factor}
        options |= {"max_num_batched_tokens": rng.choice((13, 24, 40))}
    if rng.random() < 0.2:
        options |= {"host_cache_gib": 0.01, "host_cache_policy": "always"}
    return options


def runs(
    names: Sequence[str], methods: Sequence[str], count: int, seed: int, folder: Path
) -> Iterator[Run]:
    """Runs `count` mixtures, each with one of the methods, and with one of the checkpoints or, for
    an EAGLE-3 head, with the head's model.

    Args:
        names: checkpoints of HEADS.
        methods: speculative methods.
        count: number of mixtures.
        seed: seed of all random choices.
        folder: an empty folder for checkpoints.
    """
    llama = folder / "llama"
    llama.mkdir()
    write_specimen("llama", llama)
    known: dict[tuple[str, bool, int], list[Case]] = {}
    for start in range(0, count, PER_ENGINE):
        rng = random.Random(f"{seed} {start}")
        name, method = rng.choice(names), rng.choice(methods)
        if method == "draft" and name in NO_DRAFT_MODELS:
            method = "mtp"
        if method == "eagle3":
            name = method
        model, draft = _written(name, folder)
        if draft is None:
            draft = model if name in DRAFT_FOR_THEMSELVES else llama
        options, number = options_of(rng, method, draft), min(PER_ENGINE, count - start)
        # Results differ bitwise between torch and the compiled library, which also depends on the
        # page size.
        on_torch = options["on_device"] or method == "eagle3"
        key = name, on_torch, options["page_size"]
        if key not in known:
            own: dict[str, Any] = {"cpu_backend": "torch"} if on_torch else {}
            own["page_size"] = options["page_size"]
            known[key] = cases_of(model, NUM_CASES, **own)
        counts, differences = Counter[str](), list[str]()
        texts = [[*case.prompt, *case.alone.token_ids] for case in known[key]]
        with (
            pytest.MonkeyPatch.context() as patch,
            drafting_engine(model, **options) as engine,
        ):
            OracleDrafts(patch, texts)  # random texts repeat few n-grams
            for _ in range(number):
                mixture = Mixture(engine, known[key], rng, rng.randrange(4, 20))
                differences += mixture.run()
                counts["hits"] += mixture.num_hits
            drafted, accepted = engine.counts
            counts.update(drafted=drafted, accepted=accepted, preempted=engine.num_preemptions)
        yield Run(f"{name}, mixture {start}", method, options, number, counts, differences)


def _written(name: str, folder: Path) -> tuple[Path, Path | None]:
    """The checkpoint `name` in a folder, written on first use, and its EAGLE-3 head; None if it has
    none."""
    own = folder / name
    is_new = not own.exists()
    own.mkdir(exist_ok=True)
    if name == "eagle3":
        return write_predicting(own) if is_new else (own / "model", own / "head")
    return write_with_head(name, own) if is_new else own, None


def main() -> None:
    """Prints the runs that differ, then totals by method; exits with 1 if a run differs."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--mixtures", type=int, default=NUM_MIXTURES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", nargs="+", choices=[*HEADS], default=[*HEADS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, total, wrong = time.monotonic(), 0, 0
    totals: dict[str, Counter[str]] = {method: Counter() for method in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        for run in runs(args.heads, args.methods, args.mixtures, args.seed, Path(folder)):
            total, wrong = total + run.num_mixtures, wrong + len(run.differences)
            totals[run.method].update(run.counts)
            if run.differences:
                print(f"{run.name}, {run.options}", *run.differences, sep="\n  ", flush=True)
    for method, counts in totals.items():
        print(f"{method}: {', '.join(f'{number} {kind}' for kind, number in counts.items())}")
    print(f"{total} mixtures, {wrong} differences, {time.monotonic() - started:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
