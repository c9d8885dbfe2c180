"""Flags of endpoint benchmarks, and conversion of parsed flags to options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from cluster.bench.datasets import DatasetOptions
from cluster.bench.metrics import MetricOptions
from cluster.bench.serve import CHAT, COMPLETIONS, ServeOptions
from cluster.cli.options import add_options, given_options

_ENDPOINTS = {"completions": COMPLETIONS, "chat": CHAT}


def add_load_flags(parser: argparse.ArgumentParser, exclude: Collection[str] = ()) -> None:
    """Adds all flags of a load except for fields of ServeOptions in `exclude`."""
    add_options(parser.add_argument_group("load"), ServeOptions, exclude)
    add_options(parser.add_argument_group("prompts"), DatasetOptions)
    if "metrics" not in exclude:
        add_options(parser.add_argument_group("metrics"), MetricOptions)
        parser.add_argument(
            "--goodput",
            nargs="+",
            default=[],
            metavar="METRIC:MS",
            help="limits that a request must meet to count for goodput, such as ttft:500 tpot:50",
        )


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """DatasetOptions from parsed flags."""
    return DatasetOptions(**given_options(args, DatasetOptions))


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """ServeOptions from parsed flags. Raises ValueError if a value is out of range."""
    given = given_options(args, ServeOptions)
    if "endpoint" in given:
        given["endpoint"] = _ENDPOINTS.get(given["endpoint"], given["endpoint"])
    given["api_key"] = given.get("api_key") or os.environ.get("OPENAI_API_KEY")
    given["dataset"] = dataset_options(args)
    goodput = _goodput(getattr(args, "goodput", []))
    metrics = given_options(args, MetricOptions) | {"goodput": goodput}
    return ServeOptions(**given, metrics=MetricOptions(**metrics))


def _goodput(pairs: list[str]) -> dict[str, float] | None:
    goals: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            raise ValueError(
                f"--goodput must be METRIC:MS, such as ttft:500, got {pair!r}"
            ) from None
    return goals or None
