"""`rayfleet serve`: starts a fleet, and stops it on SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cluster.autoscaling.config import AutoscalingConfig
from cluster.checkpoints import CHAT, Example, check_model, example_request
from cluster.cli.options import add_option_groups, add_options, flag_name, given_options
from cluster.cli.parser import CommandParser
from cluster.config import (
    ADMIN_API_KEY,
    API_KEY,
    EndpointConfig,
    FleetConfig,
    ModelSpec,
    ServeConfig,
    find_demo_model,
    serve_config_from_mapping,
)
from cluster.ports import is_loopback
from router.config import RoutingConfig
from router.tokens.defaults import read_chat_template
from worker.config import EngineConfig
from worker.protocol.log import setup_logging
from worker.protocol.options import options_of

if TYPE_CHECKING:
    from rich.console import Console

KEY_ON_PROCESS_LIST = (
    "keys given by --api-key and --admin-api-key are visible in this machine's process list: use "
    f"the environment variables {API_KEY} and {ADMIN_API_KEY}, or --api-key-file and "
    "--admin-api-key-file instead"
)
CERTIFICATE_CHECK_S = 60.0
"""Interval in seconds between checks for renewed TLS certificate files."""
PER_MODEL = (FleetConfig, AutoscalingConfig, RoutingConfig, EngineConfig)


COMMON = frozenset(
    (
        "--config",
        "--address",
        "--host",
        "--port",
        "--api-key-file",
        "--allowed-origins",
        "--num-gateways",
        "--metrics-port",
        "--num-workers",
        "--served-model-name",
        "--tool-call-parser",
        "--chat-template",
        "--max-workers",
        "--min-workers",
        "--revision",
        "--task",
        "--tensor-parallel-size",
        "--device",
        "--dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
        "--host-cache-gib",
        "--speculative-method",
        "--batch-invariant",
    )
)
"""Flags listed by `serve --help`; `--help=all` lists all."""


def add_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `rayfleet serve` to its parser."""
    parser.common = COMMON
    parser.epilog = (
        f"The environment variable {API_KEY} sets API keys, separated by commas, in addition to "
        "those of --api-key-file. Unlike --api-key, it is not visible in the process list."
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="folder of a Hugging Face checkpoint, or a Hub repository (default: the demo model)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with a list `models:`; endpoint flags take precedence",
    )
    parser.add_argument(
        "--address",
        help="address of a running Ray cluster to join (default: start a local one)",
    )
    add_option_groups(parser, "endpoint", EndpointConfig)
    add_option_groups(parser, "fleet", FleetConfig)
    add_options(parser.add_argument_group("autoscaling"), AutoscalingConfig)
    add_options(parser.add_argument_group("routing"), RoutingConfig)
    add_option_groups(parser, "engine", EngineConfig, exclude=["model"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    began = time.monotonic()
    config = configure(arguments)
    # Gateways get the keys with their configuration; processes started from here on do not need
    # them in their environment.
    for variable in (API_KEY, ADMIN_API_KEY):
        os.environ.pop(variable, None)
    # Skipped for a joined cluster, whose other nodes have the files, and with startup_retry_s, when
    # they may be mounted later.
    if arguments.address is None and not config.endpoint.startup_retry_s:
        for model in config.models:
            check_model(model.engine)
            if model.fleet.chat.chat_template:
                read_chat_template(model.fleet.chat.chat_template)
    from cluster.launch import LaunchError, LocalFleet

    console = _console(config.endpoint)
    if hasattr(arguments, "api_keys") or hasattr(arguments, "admin_api_key"):
        console.print(KEY_ON_PROCESS_LIST, style="yellow", markup=False, soft_wrap=True)
    if (warning := open_listener(config.endpoint)) is not None:
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    stop = threading.Event()
    fleet = LocalFleet(
        config,
        address=arguments.address,
        report=lambda line: _report(console, f"{time.monotonic() - began:5.1f} s  {line}", stop),
    )
    _report(console, f"{time.monotonic() - began:5.1f} s  starting {_summary(config)}", stop)
    try:
        _on_signals(_interrupt)
        fleet.start()
        _on_signals(lambda number, frame: stop.set())
        example = example_request(config.models[0].engine)
        text = banner(config, fleet.base_url, fleet.log_directory, example)
        if config.endpoint.log_format == "json":
            text = text.strip().partition("\n")[0]  # without the example for interactive use
        console.print(text, markup=False, soft_wrap=True)
        while not stop.wait(CERTIFICATE_CHECK_S):
            fleet.refresh_certificate()
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        if not isinstance(console, LogConsole):
            raise  # printed by `main`
        console.print(str(error), style="red")
        return 2
    except LaunchError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    finally:
        _on_signals(signal.SIG_IGN)
        console.print("stopping")
        fleet.stop()
    return 0


class LogConsole:
    """Console of `rayfleet serve` for --log-format json: prints lines as log records."""

    def print(self, text: str, *, style: str | None = None, **_: object) -> None:
        """Logs a line at the level for its style."""
        level = {"yellow": logging.WARNING, "red": logging.ERROR}.get(style or "", logging.INFO)
        logging.getLogger(__name__).log(level, "%s", text.strip())


def _console(endpoint: EndpointConfig) -> Console | LogConsole:
    if endpoint.log_format == "json":
        setup_logging(endpoint.log_level, "json", "serve")
        return LogConsole()
    from rich.console import Console

    return Console(highlight=False, stderr=True)


def configure(arguments: argparse.Namespace) -> ServeConfig:
    """Configuration of the fleet from the arguments.

    Raises:
        ValueError: arguments conflict, or a value is out of range.
    """
    per_model: dict[str, Any] = {}
    for cls in PER_MODEL:
        per_model |= given_options(arguments, cls)
    if arguments.model is None:
        per_model.pop("model")
    if names := per_model.pop("served_model_name", ()):
        if len(names) > 1 and arguments.model is None:
            raise ValueError(
                "--served-model-name accepts several names: put the model before this flag"
            )
        per_model["served_model_name"], *aliases = names
        if aliases:
            per_model["served_model_aliases"] = tuple(aliases)
    settings: dict[str, Any] = {}
    if arguments.config is not None:
        settings = _read_yaml(arguments.config)
        if per_model:
            names = ", ".join(sorted(_flag(name) for name in per_model))
            raise ValueError(
                f"per-model options cannot be combined with --config: set {names} in "
                f"{arguments.config}"
            )
    else:
        if arguments.model is None:
            per_model["model"] = find_demo_model()
        settings["models"] = [per_model]
    settings |= given_options(arguments, EndpointConfig)
    return serve_config_from_mapping(settings)


def open_listener(endpoint: EndpointConfig) -> str | None:
    """A warning if the endpoint requires no key and listens beyond loopback; otherwise None."""
    guarded = endpoint.access.api_keys or endpoint.access.api_key_file
    if guarded or is_loopback(endpoint.host):
        return None
    return (
        f"port {endpoint.port} is accessible from other machines without an API key: set {API_KEY} "
        "or --api-key-file (`rayfleet keys new NAME` generates a key)"
    )


def _flag(name: str) -> str:
    options = {name: option for cls in PER_MODEL for name, option in options_of(cls).items()}
    return "MODEL" if name == "model" else flag_name(options[name])


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cannot read --config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--config {path} must be a YAML mapping with a list `models:`")
    return settings


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(console: Console | LogConsole, line: str, stopping: threading.Event) -> None:
    # Ray replaces the SIGTERM handler while it starts; each phase restores ours.
    if not stopping.is_set():
        _on_signals(_interrupt)
    console.print(line, markup=False, soft_wrap=True)


def _summary(config: ServeConfig) -> str:
    return ", ".join(
        f"{m.name} ({_workers(m)} worker(s) of {m.engine.tensor_parallel_size} rank(s))"
        for m in config.models
    )


def _workers(model: ModelSpec) -> str:
    if not model.autoscaling.enabled:
        return str(model.fleet.num_workers)
    return f"{model.min_workers} to {model.max_workers}"


def banner(config: ServeConfig, base_url: str, logs: str, example: Example = CHAT) -> str:
    """Text with the URLs of the API and the web page, and an example request. It contains no key,
    since it remains in terminals and logs."""
    body = {"model": config.models[0].name, **example.fields}
    access = config.endpoint.access
    guarded = bool(access.api_keys or access.api_key_file)
    authorization = f' -H "Authorization: Bearer ${API_KEY}"' if guarded else ""
    key = f"Example, with one of the keys in {API_KEY}:\n" if guarded else ""
    return (
        f"\nServing on {base_url}/v1   (logs: {logs})\n"
        f"Web page with chat and fleet status: {base_url}/\n\n{key}"
        f"curl -N {base_url}{example.route} -H 'Content-Type: application/json'"
        f"{authorization} \\\n  -d '{json.dumps(body)}'\n\nPress Ctrl-C to stop."
    )
