"""`make check-tenants`: checks whether an API key can find out what another key has requested.

Two keys send the same prompts. The second key's time to first token and usage must not reveal
whether the first key has sent a prompt before. Its own repeated prompts must hit the cache and be
measurably faster; otherwise, the measurement is not sensitive enough.
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
import scipy  # imported lazily: its submodules take a second

from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.launch import LocalFleet
from tests.campaigns.checks import check_main, serve_config

MODEL = "shared"
FIRST, SECOND = "first-key", "second-key"
INDISTINGUISHABLE = 0.05
"""Maximum distance of the area under the ROC curve from 0.5 (a guess). For 1,200 samples that do
not differ, its standard deviation is 0.017."""
VISIBLE = 0.7
"""Minimum area under the ROC curve for the key's own repeated prompts; below it, the measurement is
not sensitive enough."""
_TIMEOUT_S = 120.0
_WARM_UP = 50
"""Requests before the first measured one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsOptions:
    """Number and length of prompts."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    num_samples: int = 1200
    """Number of prompts; the first key has sent half of them before."""
    input_len: int = 256
    """Tokens per prompt."""
    seed: int = 0
    """Seed of the prompts and of who has sent them before."""

    def __post_init__(self) -> None:
        if self.num_samples < 20:
            raise ValueError(f"--num-samples must be at least 20, got {self.num_samples}")


@dataclass(kw_only=True, slots=True)
class Samples:
    """Measurements of the second key."""

    warm_s: list[float] = field(default_factory=list)
    """Times to first token of prompts that the first key has sent before."""
    cold_s: list[float] = field(default_factory=list)
    """Times to first token of prompts that nobody has sent before."""
    own_s: list[float] = field(default_factory=list)
    """Times to first token of prompts that the second key has sent before."""
    foreign_tokens: int = 0
    """Cached tokens in the second key's usage for prompts that it has not sent before."""
    own_misses: int = 0
    """Number of prompts that the second key sent twice without a cache hit."""


def run_tenants(options: TenantsOptions) -> Result:
    """Measures a fleet with default settings."""
    samples = _measure(options)
    medians = {"warm": samples.warm_s, "cold": samples.cold_s, "own": samples.own_s}
    return {
        **{
            f"{name}_median_ms": percentile(times, 50.0) * 1000.0 for name, times in medians.items()
        },
        "checks": checks_json(judge(samples)),
    }


def judge(samples: Samples) -> list[Check]:
    """Checks of what the second key can observe."""
    auc = sooner(samples.warm_s, samples.cold_s)
    return [
        at_least("num_samples", len(samples.warm_s) + len(samples.cold_s), "requests", 1000),
        at_most("auc_from_a_guess", abs(auc - 0.5), "share", INDISTINGUISHABLE),
        exactly("foreign_cached_tokens", samples.foreign_tokens, "tokens", 0),
        exactly("own_second_requests_without_a_hit", samples.own_misses, "requests", 0),
        at_least("auc_of_own_prompts", sooner(samples.own_s, samples.cold_s), "share", VISIBLE),
    ]


def sooner(some: Sequence[float], others: Sequence[float]) -> float:
    """Probability that a value of `some` is less than a value of `others`: the area under the ROC
    curve."""
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
    # The first ids are special tokens.
    return [rng.randrange(vocab_size // 8, vocab_size) for _ in range(length)]


def _ask(client: httpx.Client, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first and only token, and number of cached tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    elapsed_s = time.perf_counter() - began
    response.raise_for_status()
    usage: dict[str, Any] = response.json()["usage"]
    return elapsed_s, int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


if __name__ == "__main__":
    sys.exit(check_main(run_tenants, TenantsOptions))
