"""Commands of the comparisons in `presets.py`.

A comparison's module imports torch, so it is imported only when the comparison runs.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from typing import Any

from cluster.bench.command import AddCommand
from cluster.bench.report import Result
from cluster.cli.options import add_option_groups, add_options, given_options
from cluster.config import find_demo_model
from deploy.benchmarks.ab.presets import PRESETS
from worker.config import EngineConfig


def add_ab_commands(add: AddCommand) -> None:
    """Adds a command for each preset."""
    for name, preset in PRESETS.items():
        parser = add(name, preset.measures, partial(_run, name))
        text = preset.model or "checkpoint folder; default: the demo model"
        parser.add_argument("--model", required=bool(preset.model), help=text)
        add_option_groups(parser, "engine", EngineConfig, exclude=preset.set_here)
        add_options(parser, preset.options, exclude=("engine",))


def _run(name: str, args: argparse.Namespace) -> Result:
    options = PRESETS[name].options
    args.model = args.model or find_demo_model()
    own: dict[str, Any] = given_options(args, options)
    found: Result = import_module(f"deploy.benchmarks.ab.{name}").run(
        options.from_flags(given_options(args, EngineConfig), own)
    )
    return found
