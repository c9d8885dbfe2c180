"""`rayfleet lora`: lists, loads and unloads LoRA adapters of a running fleet."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.cli.endpoint import Endpoint, EndpointOptions
from cluster.cli.options import add_options, given_options
from cluster.config import ADMIN_API_KEY

HEADS = ("ADAPTER", "MODEL", "DEVICE", "HOST", "PATH")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions(EndpointOptions):
    """Options of `lora`: URL and admin key."""

    api_key: str = field(default="", repr=False)
    """Admin key of the fleet. The flag is visible in the process list: prefer the environment
    variable RAYFLEET_ADMIN_API_KEY."""

    @property
    def key(self) -> str:
        """Admin key to send; empty if there is none."""
        return self.api_key or os.environ.get(ADMIN_API_KEY, "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet lora` to its parser."""
    parser.description = (
        "Lists, loads and unloads LoRA adapters of a running fleet; requires the admin key. "
        "Changes apply to all gateways and workers, including those that start later."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list adapters, and how many workers have each")
    listing.set_defaults(run=run_list)
    load = actions.add_parser("load", help="load an adapter")
    load.add_argument("name", help="model name of requests that use the adapter")
    load.add_argument("path", help="folder on the workers' nodes, as PEFT saves it")
    load.add_argument("--model", help="base model, if several models serve adapters")
    load.add_argument(
        "--load-inplace", action="store_true", help="replace a loaded adapter of this name"
    )
    load.set_defaults(run=run_load)
    unload = actions.add_parser("unload", help="unload an adapter; its running requests continue")
    unload.add_argument("name", help="name of the adapter")
    unload.set_defaults(run=run_unload)
    for action in (listing, load, unload):
        add_options(action, LoraOptions)


def run_list(arguments: argparse.Namespace) -> int:
    """Prints a row per adapter; returns the exit code."""
    rows = _endpoint(arguments).get("/admin/lora_adapters")["data"]
    lines = [HEADS, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    return 0


def run_load(arguments: argparse.Namespace) -> int:
    """Loads an adapter; returns the exit code."""
    body = {"lora_name": arguments.name, "lora_path": arguments.path}
    if arguments.model:
        body["model"] = arguments.model
    if arguments.load_inplace:
        body["load_inplace"] = True
    print(_endpoint(arguments).post("/v1/load_lora_adapter", body))
    return 0


def run_unload(arguments: argparse.Namespace) -> int:
    """Unloads an adapter; returns the exit code."""
    print(_endpoint(arguments).post("/v1/unload_lora_adapter", {"lora_name": arguments.name}))
    return 0


def cells(row: dict[str, Any]) -> Sequence[str]:
    """Cells of an adapter's row, in the order of HEADS."""
    return (
        row["lora_name"],
        row["model"],
        str(len(row["on_device"])),
        str(len(row["on_host"])),
        row["lora_path"] or "-",
    )


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    options = LoraOptions(**given_options(arguments, LoraOptions))
    return Endpoint(options.url, options.key, variable=ADMIN_API_KEY)
