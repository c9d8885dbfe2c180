"""Configuration of a fleet: its models, their workers, and the endpoint. Command-line flags, config
files and `build_app` share it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import msgspec

from cluster.autoscaling.config import AutoscalingConfig
from cluster.ports import is_loopback
from router.config import (
    AccessConfig,
    ChatConfig,
    GatewayConfig,
    ModelRoute,
    RoutingConfig,
    TenantConfig,
)
from worker.config import EngineConfig
from worker.metrics.node import NodeMetricsConfig
from worker.protocol.analyzed import analyzed
from worker.protocol.options import from_options, group, options_of

T = TypeVar("T")

API_KEY = "RAYFLEET_API_KEY"
"""Environment variable with additional API keys, separated by commas."""
ADMIN_API_KEY = "RAYFLEET_ADMIN_API_KEY"
"""Environment variable with the key for --admin-api-key."""
RENAMED = {
    "fair_by": "fairness_key",
    "salt_by": "cache_isolation",
    "speculative_deadline_margin_ms": "deadline_margin_ms",
    "worker_wait_s": "no_worker_timeout_s",
}
"""New names of renamed options by their old names. The old name is rejected, as a key of config
files and, with dashes, as a flag; the message names the new one."""
_DERIVED = "removed: routing derives it (see router/fleet/constants.py)"
REMOVED = dict.fromkeys(
    (
        "adaptive_min_beta",
        "adaptive_max_beta",
        "adaptive_window_s",
        "adaptive_decode_weight",
        "adaptive_eviction_weight",
    ),
    _DERIVED,
) | {
    "prefill_max_ms": "replaced by default_tpot_ms, the time per token that prefills leave to "
    "decodes",
}
"""Reasons why options were removed, by the option's name."""
_SEVERAL_WORKERS = "use --num-workers: each worker is a full copy of the model"
_PARSER_IS_FOUND = (
    "always enabled: the format is detected from the chat template (see --tool-call-parser)"
)
UNSUPPORTED = {
    "trust_remote_code": "code of checkpoints is never executed: only architectures that rayfleet "
    "implements are supported (see README)",
    "ssl_ca_certs": "client certificates are not supported: use API keys",
    "ssl_keyfile_password": "encrypted private keys are not supported: decrypt the key file",
    "data_parallel_size": _SEVERAL_WORKERS,
    "dp": _SEVERAL_WORKERS,
    "dp_size": _SEVERAL_WORKERS,
    "pipeline_parallel_size": "not supported: use --tensor-parallel-size",
    "pp": "pipeline parallelism is not supported: use --tensor-parallel-size",
    "tp_size": "use --tensor-parallel-size or -tp",
    "enable_auto_tool_choice": _PARSER_IS_FOUND,
    "enable_reasoning": _PARSER_IS_FOUND,
    "block_size": "use --page-size",
    "num_gpu_blocks_override": "use --kv-cache-tokens",
    "mem_fraction_static": "use --gpu-memory-utilization",
    "context_length": "use --max-model-len",
    "chunked_prefill_size": "use --max-num-batched-tokens",
    "max_running_requests": "use --max-num-seqs",
    "scheduling_policy": "requests are always scheduled by priority; for the order of equal "
    "priorities use --schedule-policy",
    "swap_space": "use --host-cache-gib",
    "tokenizer_mode": "only fast tokenizers (tokenizer.json) are supported",
    "model_path": "pass the model without a flag: rayfleet serve MODEL",
    "model": "pass the model without a flag: rayfleet serve MODEL",
    "uvicorn_log_level": "use --log-level",
}
"""Unsupported options of vLLM and SGLang by name: the reason, or the option to use instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """Options of one model other than its engine's: number of workers, names, template, parsers."""

    num_workers: int = 1
    """Number of workers, each with a full copy of the model."""
    tensor_parallel_placement: Literal["node", "pack", "spread"] = "node"
    """Placement of a worker's ranks: all on one node (node), on as few nodes as possible (pack), or
    on as many as possible (spread). Ranks on different nodes communicate over TCP."""
    served_model_name: str | None = field(
        default=None, metadata={"argparse": {"nargs": "+", "action": "extend"}}
    )
    """Name of the model in the API; by default the last part of the model's path. If several names
    are given on the command line, all of them are accepted."""
    served_model_aliases: tuple[str, ...] = field(default=(), metadata={"flag": None})
    """Additional names of the model; only for config files."""
    chat: ChatConfig = field(default_factory=ChatConfig, metadata=group("chat"))
    """Chat template, default sampling parameters and output parsers."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"--num-workers must be at least 1, got {self.num_workers}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model of the fleet."""

    fleet: FleetConfig
    """Number of workers, names, template and parsers."""
    engine: EngineConfig
    """Engine options of each worker."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Routing options of the gateways."""
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """Autoscaling options; disabled by default."""

    def __post_init__(self) -> None:
        if self.autoscaling.enabled and self.fleet.num_workers != 1:
            raise ValueError(
                "--num-workers and --max-workers are mutually exclusive: use --num-workers for a "
                "fixed number, or --min-workers and --max-workers for autoscaling"
            )

    @property
    def min_workers(self) -> int:
        """Minimum and initial number of workers."""
        return self.autoscaling.min_workers if self.autoscaling.enabled else self.fleet.num_workers

    @property
    def max_workers(self) -> int:
        """Maximum number of workers."""
        return self.autoscaling.max_workers or self.fleet.num_workers

    @property
    def name(self) -> str:
        """Name of the model in the API."""
        return self.fleet.served_model_name or os.path.basename(self.engine.model.rstrip("/"))

    @property
    def deployment(self) -> str:
        """Name of the Serve deployment of the model's workers."""
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.name)
        return f"worker-{safe}"


_METRICS = {"within": "--metrics-config"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Options of the endpoint and of the whole fleet: address, metrics, logs, access and
    tenants."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """Port to listen on."""
    ssl_certfile: str = ""
    """PEM file with the TLS certificate chain. If set, the endpoint is served over HTTPS only."""
    ssl_keyfile: str = ""
    """PEM file with the private key of --ssl-certfile; only needed if --ssl-certfile does not
    contain the key."""
    num_gateways: int = 1
    """Number of gateway processes, which handle HTTP, tokenization and routing."""
    max_gateways: int = 0
    """Maximum number of gateway processes. If set, gateways are scaled with CPU usage, starting
    with --num-gateways; 0 disables scaling."""
    responses_store_mib: int = 64
    """Maximum size in MiB of the responses (/v1/responses) stored by each gateway process, for
    `previous_response_id` and retrieval by ID; 0 disables storage."""
    log_format: Literal["text", "json"] = "text"
    """Log format of all processes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log messages."""

    metrics_host: str = field(default="127.0.0.1", metadata=_METRICS)
    """Address on each node that --metrics-port listens on; no API key is required there."""
    metrics_port: int = 0
    """Port on each node that exports the metrics of all its processes at /metrics; 0 disables it.
    The endpoint's /metrics covers only the node of the gateway that handles the request."""
    metrics_vllm_names: bool = field(default=False, metadata=_METRICS)
    """Also export the metrics of the Gateway API's model server protocol (running and waiting
    requests, usage and configuration of the KV cache) under their `vllm:` names."""
    otlp_traces_endpoint: str = ""
    """URL to which OpenTelemetry traces are sent over OTLP/HTTP; requires the `tracing` extra."""
    startup_retry_s: float = 0.0
    """Seconds during which gateways and workers retry a failed start if the failure may be
    temporary: a model folder that is not mounted yet, an unavailable Hub, or a failed rank. 0
    disables retries; inf retries indefinitely and is the default in Ray Serve configs, which do not
    restart a failed deployment."""
    access: AccessConfig = field(default_factory=AccessConfig, metadata=group("access"))
    """Keys, accepted hosts and origins, and the audit log."""
    tenants: TenantConfig = field(default_factory=TenantConfig, metadata=group("tenants"))
    """Rules for how tenants share workers, caches and metrics."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"--port must be in [1, 65535], got {self.port}")
        if not 0 <= self.metrics_port < 65536 or self.metrics_port == self.port:
            raise ValueError(
                f"--metrics-port must be 0 or a port other than --port, got {self.metrics_port}"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("--ssl-keyfile needs --ssl-certfile: set both")
        if self.num_gateways < 1:
            raise ValueError(f"--num-gateways must be at least 1, got {self.num_gateways}")
        if self.max_gateways and self.max_gateways < self.num_gateways:
            raise ValueError(
                "--max-gateways must be 0 or at least --num-gateways, got "
                f"{self.max_gateways} and {self.num_gateways}"
            )
        if self.responses_store_mib < 0:
            raise ValueError(
                f"--responses-store-mib must be at least 0, got {self.responses_store_mib}"
            )
        if not self.startup_retry_s >= 0.0:
            raise ValueError(f"--startup-retry-s must be at least 0, got {self.startup_retry_s}")

    @property
    def gateway_limit(self) -> int:
        """Maximum number of gateways, autoscaled or not."""
        return max(self.num_gateways, self.max_gateways)


def known_hosts(endpoint: EndpointConfig) -> tuple[str, ...]:
    """Host names accepted in `Host`, besides IP addresses; empty for any.

    On loopback, any other name indicates DNS rebinding: a web page whose host name resolves to this
    machine.
    """
    names = endpoint.access.allowed_hosts
    if not names and not is_loopback(endpoint.host):
        return ()
    return tuple(dict.fromkeys(("localhost", endpoint.host, *names)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Configuration of a whole fleet: one endpoint and the models behind it."""

    endpoint: EndpointConfig
    """Options of the endpoint."""
    models: tuple[ModelSpec, ...]
    """The models that are served."""

    def __post_init__(self) -> None:
        self.gateway()  # raises ValueError without models, or for duplicate names

    def gateway(self) -> GatewayConfig:
        """Configuration of each gateway."""
        routes = tuple(
            ModelRoute(
                name=m.name,
                aliases=m.fleet.served_model_aliases,
                model=m.engine.model,
                revision=m.engine.revision,
                tokenizer=m.engine.tokenizer,
                chat=m.fleet.chat,
                routing=m.routing,
                enable_lora=m.engine.lora is not None,
                lora_modules=tuple(m.engine.lora.folders) if m.engine.lora else (),
                on_demand=m.autoscaling.to_zero,
                min_workers=m.min_workers,
                max_workers=m.max_workers,
            )
            for m in self.models
        )
        return GatewayConfig(
            models=routes,
            access=self.endpoint.access,
            known_hosts=known_hosts(self.endpoint),
            tenants=self.endpoint.tenants,
            responses_store_mib=self.endpoint.responses_store_mib,
            startup_retry_s=self.endpoint.startup_retry_s,
        )

    def node_metrics(self) -> NodeMetricsConfig:
        """Address, port and names of the metrics exported by each node."""
        return NodeMetricsConfig(
            host=self.endpoint.metrics_host,
            port=self.endpoint.metrics_port,
            vllm_names=self.endpoint.metrics_vllm_names,
        )


def serve_config_from_mapping(settings: Mapping[str, Any]) -> ServeConfig:
    """Configuration of a fleet from a config file or from the `args` of a Ray Serve config.

        host: 0.0.0.0
        api_keys: [secret]
        models:
          - model: org/name          # engine options and fleet options side by side
            num_workers: 2
            tensor_parallel_size: 2

    Raises:
        ValueError: a key is unknown, or a value has the wrong type; the message names it.
    """
    settings = dict(settings)
    models = settings.pop("models", None)
    if not isinstance(models, list) or not models:
        raise ValueError("the configuration needs a list `models:` with at least one model")
    settings = _with_keys_of(os.environ, settings)
    endpoint = dataclass_from_mapping(EndpointConfig, settings, "the configuration")
    return ServeConfig(endpoint=endpoint, models=tuple(_model_spec(model) for model in models))


def _with_keys_of(environment: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the environment's API keys and, unless an admin key is set, its admin key.

    Raises:
        ValueError: the variable for API keys is set but empty, which would disable authentication.
    """
    found = dict(settings)
    if (text := environment.get(API_KEY)) is not None:
        keys = [key.strip() for key in text.split(",") if key.strip()]
        if not keys:
            raise ValueError(
                f"{API_KEY} is set but contains no keys: unset it to serve without API keys"
            )
        found["api_keys"] = [*(found.get("api_keys") or ()), *keys]
    if key := environment.get(ADMIN_API_KEY):
        found.setdefault("admin_api_key", key)
    return found


def dataclass_from_mapping(cls: type[T], settings: Mapping[str, Any], context: str) -> T:
    """An instance of the dataclass `cls` with options from `settings`.

    Raises:
        ValueError: a key is unknown, or a value has the wrong type; the message names it and
            `context`.
    """
    kind: type = cls
    known = options_of(kind)
    unknown = [key for key in settings if key not in known]
    hints = [f"{key} is now {RENAMED[key]}" for key in unknown if key in RENAMED]
    reasons = REMOVED | UNSUPPORTED
    hints += [f"{key}: {reasons[key]}" for key in unknown if key in reasons]
    if hints:
        raise ValueError(f"unsupported options in {context}: {', '.join(hints)}")
    if unknown:
        raise ValueError(
            f"unknown options in {context}: {', '.join(map(str, unknown))} "
            f"(supported: {', '.join(known)})"
        )
    try:
        values = msgspec.convert(dict(settings), analyzed(_settings_type(kind)))
        return from_options(cls, values)
    except ValueError as error:
        raise ValueError(f"in {context}: {error}") from error


@cache
def _settings_type(cls: type) -> type[dict[str, Any]]:
    """TypedDict of a dataclass's options, for msgspec to check types."""
    hints = {name: option.hint for name, option in options_of(cls).items()}
    create: Any = TypedDict  # mypy supports literal fields only
    found: type[dict[str, Any]] = create(cls.__name__, hints, total=False)
    return found


def find_demo_model() -> str:
    """Folder of the demo model, which is included in every installation.

    Raises:
        ValueError: the folder is missing.
    """
    folder = Path(__file__).resolve().with_name("demo").resolve()  # a link in the source tree
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no demo model at {folder}: pass a model (`rayfleet serve MODEL`), or train the demo "
            "model with `make demo-models`"
        )
    return str(folder)


def _model_spec(settings: object) -> ModelSpec:
    if not isinstance(settings, Mapping) or "model" not in settings:
        raise ValueError(
            "each entry of `models:` needs a key `model`, got "
            f"{json.dumps(settings, default=str):.200}"
        )
    context = f"the options of model {settings['model']}"
    engine = dict(settings)
    fleet, routing, autoscaling = (
        {name: engine.pop(name) for name in options_of(cls) if name in engine}
        for cls in (FleetConfig, RoutingConfig, AutoscalingConfig)
    )
    return ModelSpec(
        fleet=dataclass_from_mapping(FleetConfig, fleet, context),
        engine=dataclass_from_mapping(EngineConfig, engine, context),
        routing=dataclass_from_mapping(RoutingConfig, routing, context),
        autoscaling=dataclass_from_mapping(AutoscalingConfig, autoscaling, context),
    )
