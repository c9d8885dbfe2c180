"""Common parts of system checks: command line, small fleet, complete answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cluster.bench.client import Record
from cluster.bench.command import run_measurement
from cluster.bench.report import Check, Result, emit
from cluster.cli.options import add_options, given_options
from cluster.cli.parser import CommandParser
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig, find_demo_model
from cluster.ports import free_ports
from worker.config import EngineConfig
from worker.protocol.options import from_options

T = TypeVar("T")


def check_main(
    run: Callable[[T], Result], options: type[T], arguments: Sequence[str] | None = None
) -> int:
    """Runs a check with the options in `arguments`; returns 1 if it fails. The command's name and
    description come from the module of `run`."""
    module = sys.modules[run.__module__]
    name = module.__spec__.name if module.__spec__ else run.__module__
    parser = CommandParser(
        prog=f"python -m {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, options)
    args = parser.parse_args(arguments)
    try:
        given = options(**given_options(args, options))
    except ValueError as error:
        parser.error(str(error))
    result = run(given)
    emit(result, as_json=args.json, title=name.rpartition(".")[2].replace("_", " "))
    return 0 if all(check["holds"] for check in result["checks"]) else 1


def run_with_part_apart(
    run: Callable[[Any], Result], options: Any, part: str, flags: Sequence[str]
) -> Result:
    """Runs the parts of a check, one of them in a separate process: it needs a second fleet, but
    a process can prepare only one.

    Args:
        run: runs the parts in `options.parts`.
        options: options of the check, a dataclass.
        part: the part that needs its own process if others are selected as well.
        flags: module of the check, and its flags for this part.
    """
    others = tuple(one for one in options.parts if one != part)
    if others in ((), options.parts):
        return run(options)
    # First, because fleets leave their settings in the environment.
    apart = run_measurement(
        [sys.executable, "-m", *flags, "--json", "--parts", part], f"the part {part}"
    )
    result = run(replace(options, parts=others))
    return result | {
        key: _merged(result[key], value) if key in result else value for key, value in apart.items()
    }


def _merged(mine: Any, other: Any) -> Any:
    """Both values of a key of two results, if they can be merged; otherwise the first."""
    if isinstance(mine, dict) and isinstance(other, dict):
        return mine | other
    return mine + other if isinstance(mine, list) else mine


def serve_config(
    name: str,
    model: str | None,
    *,
    num_workers: int = 1,
    endpoint: Mapping[str, Any] | None = None,
    **engine: Any,
) -> ServeConfig:
    """Fleet with one model on CPU, on a free port.

    Args:
        name: served model name.
        model: checkpoint folder; None for the demo model.
        num_workers: number of worker groups.
        endpoint: other options of the endpoint.
        engine: options of the engine.
    """
    spec = ModelSpec(
        fleet=FleetConfig(served_model_name=name, num_workers=num_workers),
        engine=EngineConfig.of(model=model or find_demo_model(), device="cpu", **engine),
    )
    return ServeConfig(
        endpoint=from_options(EndpointConfig, {"port": free_ports(1)[0], **(endpoint or {})}),
        models=(spec,),
    )


def is_whole(record: Record) -> bool:
    """Whether a request received all its tokens."""
    return record.status == 200 and not record.error and record.output_len == record.requested_len


def with_prefix(prefix: str, checks: Sequence[Check]) -> list[Check]:
    """The checks, with names prefixed by the part of a run that they belong to."""
    return [replace(check, name=f"{prefix}_{check.name}") for check in checks]
