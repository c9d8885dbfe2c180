"""Table of the comparisons of engine variants: variants, measurements and goals.

The commands, their checks and the table in `deploy/benchmarks/README.md` are generated from it.
Each comparison has a module `deploy.benchmarks.ab.NAME` with a function `run(options) -> Result`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple, get_args

from cluster.bench.report import Check, Result, at_least, at_most
from deploy.benchmarks.ab.options import (
    AdmissionOptions,
    Comparison,
    FdfoOptions,
    OverlapOptions,
    SpeculativeOptions,
    StructuredOptions,
)
from deploy.benchmarks.kernels.shapes import BLOCK_SHAPES
from worker.config import EngineConfig
from worker.protocol.diffusion import DllmFeature
from worker.protocol.options import options_of


class Goal(NamedTuple):
    """Upper or lower limit of a metric."""

    figure: str
    """Name of the metric, or a shell-style pattern; the first goal that matches applies."""
    bound: Literal["<=", ">="]
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A comparison of engine variants that are measured in turn."""

    measures: str
    """Phrase that describes what is measured, for the command's help and the README."""
    variants: Mapping[str, Mapping[str, Any]]
    """Engine options in which the variants differ, keyed by the variant's name."""
    goals: tuple[Goal, ...]
    """Goals for metrics. Metrics without a goal are not checked."""
    options: type[Comparison]
    """Options of the command, in addition to those of the engine."""
    also_set: frozenset[str] = frozenset()
    """Other engine options that the comparison sets, and for which it has no flags."""
    has_flags: frozenset[str] = frozenset()
    """Engine options that have flags even though a variant sets them; the flags apply to the other
    variants."""
    model: str = ""
    """Help of --model if the flag is required because the demo model cannot be used."""

    @property
    def set_here(self) -> frozenset[str]:
        """Engine options that the comparison sets, and that have no flags."""
        differing = {name for options in self.variants.values() for name in options}
        return ({"model", "max_num_seqs"} | self.also_set | differing) - self.has_flags

    def config(self, variant: str, engine: EngineConfig, **load: Any) -> EngineConfig:
        """Configuration of a variant.

        Args:
            variant: name of the variant.
            engine: options of all variants.
            load: other options that the comparison sets.
        """
        return engine.with_options(**load, **self.variants[variant])

    def checks(self, figures: Result) -> list[Check]:
        """Checks of the metrics that have a goal."""
        found = []
        for name, value in figures.items():
            goal = next((goal for goal in self.goals if fnmatchcase(name, goal.figure)), None)
            if goal is not None:
                check = at_least if goal.bound == ">=" else at_most
                found.append(check(name, value, "", goal.limit))
        return found


def _blocks(*features: str, fdfo: bool = True, caches: bool = False) -> Mapping[str, Any]:
    """Options of a block-diffusion variant with the given optimizations, at overlap depth 0 as in
    the papers that describe them."""
    return {
        "dllm_fdfo": fdfo,
        "dllm_disable": tuple(name for name in get_args(DllmFeature) if name not in features),
        "enable_prefix_caching": caches,
        "overlap_depth": 0,
    }


PRESETS: Final[Mapping[str, Preset]] = {
    "overlap": Preset(
        measures="speedup of decode steps from overlap, and the share of host time that it hides",
        variants={"0": {"overlap_depth": 0}, "1": {"overlap_depth": 1}},
        goals=(
            Goal("hidden_8", ">=", 0.8),
            Goal("hidden_32", ">=", 0.8),
            Goal("ratio_1", ">=", 0.98),
            Goal("ratio_8", ">=", 1.03),
            Goal("ratio_32", ">=", 1.03),
        ),
        options=OverlapOptions,
    ),
    "admission": Preset(
        measures="TTFT with long and short prompts, without (a) and with (b) chunked prefill",
        variants={
            "a_fifo": {"prefill_admission_policy": "fifo", "prefill_first_steps": 0},
            # More steps than all prompts need.
            "a_pack": {"prefill_admission_policy": "pack", "prefill_first_steps": 64},
            "b_fifo": {"prefill_admission_policy": "fifo", "max_prefill_share": 1.0},
            "b_pack": {"prefill_admission_policy": "pack"},
        },
        goals=(
            Goal("a_ttft_p99_ratio", "<=", 0.70),
            Goal("a_ttft_p50_ratio", "<=", 0.40),
            Goal("b_short_ttft_p99_ratio", "<=", 0.40),
            Goal("b_short_ttft_p50_ratio", "<=", 0.35),
            Goal("b_ttft_p99_ratio", "<=", 1.10),
            Goal("tpot_p50_ratio", "<=", 1.03),
            Goal("throughput_ratio", ">=", 0.99),
        ),
        options=AdmissionOptions,
        also_set=frozenset(
            {name for name in options_of(EngineConfig) if name.startswith("prefill_")}
            | {"max_num_batched_tokens", "enable_chunked_prefill", "max_queued_requests"}
            | {"enable_prefix_caching"}
        ),
        has_flags=frozenset({"max_prefill_share"}),
    ),
    "structured": Preset(
        measures="speed of constrained requests, by kind of grammar",
        variants={"free": {}, "constrained": {}},
        goals=(Goal("ratio_*", ">=", 0.95),),
        options=StructuredOptions,
    ),
    "speculative": Preset(
        measures="speedup from drafts, by kind of prompt and number of requests",
        variants={
            "off": {
                "speculative_method": "none",
                "speculative_model": "",
                "speculative_revision": "",
            },
            "on": {},
        },
        goals=(
            Goal("ratio_heldout_1", ">=", 1.3),
            Goal("ratio_copy_1", ">=", 2.0),
            Goal("interval_*", ">=", 0.98),
            Goal("of_expected_*", ">=", 0.9),
            Goal("min_ratio", ">=", 0.98),
        ),
        options=SpeculativeOptions,
        has_flags=frozenset({"speculative_method", "speculative_model", "speculative_revision"}),
    ),
    "fdfo": Preset(
        measures="block diffusion: speedup from first done, first out and other optimizations",
        variants={
            "synchronous": _blocks("inplace", "mixed_rounds", fdfo=False),
            "fdfo": _blocks("inplace", "mixed_rounds"),
            "fused": _blocks("inplace", "mixed_rounds", "fused_commit", "skip_last_commit"),
            "full": {"dllm_fdfo": True, "dllm_disable": (), "enable_prefix_caching": False},
            "cached": _blocks("inplace", "mixed_rounds", caches=True),
            "reentry": _blocks("mixed_rounds", caches=True),
            "long_synchronous": _blocks("inplace", fdfo=False),
            "long_fdfo": _blocks("inplace"),
        },
        # Goals for forward passes were counted for blocks with 2.5 rounds on average (standard
        # deviation 2.3).
        goals=(
            Goal("forwards_ratio_4", ">=", 1.68),
            Goal("forwards_ratio_16", ">=", 2.27),
            Goal("forwards_ratio_*", ">=", 1.0),
            Goal("fused_forwards_ratio_4", ">=", 2.38),
            Goal("fused_forwards_ratio_16", ">=", 3.21),
            Goal("fused_forwards_ratio_*", ">=", 1.0),
            Goal("wall_ratio_4", ">=", 1.30),
            Goal("wall_ratio_16", ">=", 1.60),
            Goal("wall_ratio_*", ">=", 1.0),
            Goal("inplace_ratio_*", ">=", 1.0),
            Goal("accuracy_change_*", "<=", 0.02),
            Goal("long_prompt_wall_ratio", ">=", 2.5),
        ),
        options=FdfoOptions,
        has_flags=frozenset({"overlap_depth"}),
        model="folder of a block-diffusion checkpoint; with --replay-rounds also "
        + ", ".join(BLOCK_SHAPES),
    ),
}
"""Comparisons, keyed by the name of their command."""
