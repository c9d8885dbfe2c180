"""`make check-tenants`: can one API key tell what another has asked?

Two keys send the same prompts. Whether the first has sent one before must not show in how soon the
second has its first token, nor in its usage. Its own second request of a prompt is to find the
cache, and there it has to show in the time as well, or the measurement is blind.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import scipy  # imports its parts when they are first used; statistics take a second

from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.launch import LocalFleet
from tests.campaigns.checks import check_main, serve_config

MODEL = "shared"
FIRST, SECOND = "first-key", "second-key"
INDISTINGUISHABLE = 0.05
"""Distance of the area under the ROC curve from 0.5, a guess. Of 1,200 samples where nothing shows,
its standard deviation is 0.017."""
VISIBLE = 0.7
"""Of its own second requests it is at least this; else it could not have told in any case."""
_TIMEOUT_S = 120.0
_WARM_UP = 50
"""Requests before the first that counts: code and memory settle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsOptions:
    """How many prompts, how long."""

    model: str | None = None
    """Checkpoint folder; the demo model unless given."""
    num_samples: int = 1200
    """Prompts, half of which the first key has sent before."""
    input_len: int = 256
    """Tokens of each."""
    seed: int = 0
    """Of the prompts and of who has sent them before."""

    def __post_init__(self) -> None:
        if self.num_samples < 20:
            raise ValueError(f"--num-samples must be at least 20, got {self.num_samples}")


@dataclass(kw_only=True, slots=True)
class Samples:
    """What the second key saw."""

    warm_s: list[float] = field(default_factory=list)
    """Times to the first token of prompts that the first key had sent."""
    cold_s: list[float] = field(default_factory=list)
    """Of others."""
    own_s: list[float] = field(default_factory=list)
    """Of prompts that it has sent itself before."""
    foreign_tokens: int = 0
    """Cached tokens that its usage told of prompts that it had not sent before."""
    own_misses: int = 0
    """Prompts of which it found nothing in the cache when it sent them again."""


def run_tenants(options: TenantsOptions) -> Result:
    """Measures a fleet as it is by default."""
    samples = _measure(options)
    medians = {"warm": samples.warm_s, "cold": samples.cold_s, "own": samples.own_s}
    return {
        **{
            f"{name}_median_ms": percentile(times, 50.0) * 1000.0 for name, times in medians.items()
        },
        "checks": checks_json(judge(samples)),
    }


def judge(samples: Samples) -> list[Check]:
    """What was promised, against what the second key saw."""
    auc = sooner(samples.warm_s, samples.cold_s)
    return [
        at_least("num_samples", len(samples.warm_s) + len(samples.cold_s), "requests", 1000),
        at_most("auc_from_a_guess", abs(auc - 0.5), "share", INDISTINGUISHABLE),
        exactly("foreign_cached_tokens", samples.foreign_tokens, "tokens", 0),
        exactly("own_second_requests_without_a_hit", samples.own_misses, "requests", 0),
        at_least("auc_of_own_prompts", sooner(samples.own_s, samples.cold_s), "share", VISIBLE),
    ]


def sooner(some: Sequence[float], others: Sequence[float]) -> float:
    """How often one of `some` is less than one of `others`: the area under the ROC curve."""
    return float(scipy.stats.mannwhitneyu(others, some).statistic) / (len(some) * len(others))


def _measure(options: TenantsOptions) -> Samples:
    endpoint = {"api_keys": (FIRST, SECOND), "log_level": "warning"}
    config = serve_config(MODEL, options.model, endpoint=endpoint)
    folder = Path(config.models[0].engine.model)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    rng = random.Random(options.seed)
    samples = Samples()
    with LocalFleet(config, report=note) as fleet:
        first, second = (_client(fleet.base_url, key) for key in (FIRST, SECOND))
        with first, second:
            for number in range(_WARM_UP + options.num_samples):
                prompt, other = (_prompt(rng, options.input_len, vocab_size) for _ in range(2))
                is_warm = rng.random() < 0.5
                _ask(first, prompt if is_warm else other)
                elapsed_s, cached = _ask(second, prompt)
                own_s, own_cached = _ask(second, prompt)
                if number >= _WARM_UP:
                    samples.own_s.append(own_s)
                    (samples.warm_s if is_warm else samples.cold_s).append(elapsed_s)
                    samples.foreign_tokens += cached
                    samples.own_misses += not own_cached
    return samples


def _client(base_url: str, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S)


def _prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    # The first ids are special ones.
    return [rng.randrange(vocab_size // 8, vocab_size) for _ in range(length)]


def _ask(client: httpx.Client, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, which is the only one, and tokens found in the cache."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    elapsed_s = time.perf_counter() - began
    response.raise_for_status()
    usage: dict[str, Any] = response.json()["usage"]
    return elapsed_s, int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


if __name__ == "__main__":
    sys.exit(check_main(run_tenants, TenantsOptions))
