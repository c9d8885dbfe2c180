"""Command-line flags of `python -m deploy.benchmarks scenarios`, and the options they set."""

from __future__ import annotations

import argparse
import os
from typing import Any

from cluster.bench.command import AddCommand
from cluster.bench.jobs.scenario_options import SCENARIOS, ScenarioOptions, ScenarioRun
from cluster.bench.report import Result
from cluster.cli.options import add_option_groups, add_options, given_options
from cluster.config import find_demo_model
from worker.config import EngineConfig

_ENGINE: dict[str, Any] = {
    "kv_cache_tokens": 32768,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
}
"""Engine options whose defaults differ from those of `serve`."""


def add_scenarios_command(add: AddCommand) -> None:
    """Adds `scenarios` to the benchmark commands."""
    parser = add(
        "scenarios", "compare rayfleet with FIFO scheduling under HTTP load, in turn", _run
    )
    parser.add_argument("--model", help="checkpoint folder; default: the demo model")
    parser.add_argument(
        "--scenario",
        nargs="+",
        choices=SCENARIOS,
        default=argparse.SUPPRESS,
        help="scenarios to run; default: all",
    )
    add_options(parser.add_argument_group("traffic"), ScenarioOptions, exclude=("scenario",))
    settings = ", ".join(f"{name} {value}" for name, value in _ENGINE.items())
    add_option_groups(
        *(parser, "engine", EngineConfig, ("model",)), description=f"different defaults: {settings}"
    )


def scenario_run(args: argparse.Namespace) -> ScenarioRun:
    """Options from parsed flags. Raises ValueError if a value is out of range."""
    options = ScenarioOptions(**given_options(args, ScenarioOptions))
    given = given_options(args, EngineConfig)
    # Fleets run in turn, so the workers of each share all cores.
    cores = len(os.sched_getaffinity(0))
    defaults = {**_ENGINE, "cpu_threads": max(1, cores // options.workers)}
    model = args.model or find_demo_model()
    engine = EngineConfig.of(**(defaults | given | {"model": model}))
    if options.speculative_compare and engine.speculative is None:
        engine = engine.with_options(speculative_method="ngram")
    return ScenarioRun(options=options, engine=engine)


def _run(args: argparse.Namespace) -> Result:
    from deploy.benchmarks.scenarios.run import run_scenarios

    return run_scenarios(scenario_run(args))
