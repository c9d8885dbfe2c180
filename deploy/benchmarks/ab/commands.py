"""Commands that compare engine variants. The module of a comparison, which imports torch, is
imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

from cluster.bench.command import AddCommand
from cluster.bench.report import Result
from cluster.cli.options import add_option_groups, add_options, given_options
from cluster.config import find_demo_model
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A comparison; the module `deploy.benchmarks.ab.NAME` has its `run(options) -> Result`."""

    summary: str
    options: type[Comparison]
    model: str = ""
    """Help of --model if the flag is required since the demo model cannot be used."""


PRESETS: Final[Mapping[str, Preset]] = {
    "overlap": Preset(summary="steps at overlap depth 0 and 1, in turn", options=OverlapOptions),
    "admission": Preset(summary="fifo against pack, in turn", options=AdmissionOptions),
    "structured": Preset(
        summary="constrained requests against free ones, in turn", options=StructuredOptions
    ),
    "speculative": Preset(
        summary="tokens per second with drafts and without, in turn", options=SpeculativeOptions
    ),
    "fdfo": Preset(
        summary="block diffusion: first done, first out",
        options=FdfoOptions,
        model="folder of a block-diffusion checkpoint; for a replay also "
        + ", ".join(BLOCK_SHAPES),
    ),
}


def add_ab_commands(add: AddCommand) -> None:
    """Adds a command for each preset."""
    for name, preset in PRESETS.items():
        parser = add(name, preset.summary, partial(_run, name))
        text = preset.model or "checkpoint folder; default: the demo model"
        parser.add_argument("--model", required=bool(preset.model), help=text)
        add_option_groups(parser, "engine", EngineConfig, exclude=preset.options.SET_HERE)
        add_options(parser, preset.options, exclude=("engine",))


def _run(name: str, args: argparse.Namespace) -> Result:
    options = PRESETS[name].options
    args.model = args.model or find_demo_model()
    own: dict[str, Any] = given_options(args, options)
    found: Result = import_module(f"deploy.benchmarks.ab.{name}").run(
        options.from_flags(given_options(args, EngineConfig), own)
    )
    return found
