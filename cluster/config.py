"""Configuration of a fleet: its models, their workers, and the endpoint. Command-line flags, config
files and `build_app` share it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from cluster.autoscaling.config import AutoscalingConfig
from cluster.ports import is_loopback
from router.config import GatewayConfig, ModelRoute, RoutingConfig
from router.parsers import check_parsers
from worker.config import EngineConfig
from worker.metrics.node import NodeMetricsConfig
from worker.protocol.admission import option_name

T = TypeVar("T")

API_KEY = "RAYFLEET_API_KEY"
"""Environment variable with further keys for --api-key, separated by commas."""
ADMIN_API_KEY = "RAYFLEET_ADMIN_API_KEY"
"""Environment variable with the key for --admin-api-key."""
RENAMED = {
    "fair_by": "fairness_key",
    "salt_by": "cache_isolation",
    "speculative_deadline_margin_ms": "deadline_margin_ms",
    "worker_wait_s": "no_worker_timeout_s",
}
"""New names of renamed options, by the old one. The old name is refused, as a key of config files
and, with dashes, as a flag; the message tells the new one."""
_DERIVED = "it is gone: routing derives what it needs, see router/fleet/constants.py"
REMOVED = dict.fromkeys(
    (
        "adaptive_min_beta",
        "adaptive_max_beta",
        "adaptive_window_s",
        "adaptive_decode_weight",
        "adaptive_eviction_weight",
    ),
    _DERIVED,
)
"""Reasons why options were removed, by the option's name."""
_SEVERAL_WORKERS = "say --num-workers: each is a whole copy of the model, and routing knows them"
_PARSER_IS_FOUND = (
    "it is always on: the format is found in the chat template, see --tool-call-parser"
)
_ADAPTERS = "adapters are not served: merge them into the weights"
REFUSED = {
    "trust_remote_code": "no code of a checkpoint is ever run: architectures are served that "
    "rayfleet implements, see README",
    "quantization": "weights are of the type that the checkpoint's config.json tells: name a "
    "checkpoint that is quantized, as in FP8",
    "q": "weights are of the type that the checkpoint's config.json tells",
    "kv_cache_dtype": "keys and values are cached in the model's type, see --dtype",
    "ssl_ca_certs": "client certificates are not supported: give clients API keys",
    "ssl_keyfile_password": "encrypted private keys are not supported: decrypt the key file",
    "data_parallel_size": _SEVERAL_WORKERS,
    "dp": _SEVERAL_WORKERS,
    "dp_size": _SEVERAL_WORKERS,
    "pipeline_parallel_size": "layers are not spread over GPUs: see --tensor-parallel-size",
    "pp": "layers are not spread over GPUs: see --tensor-parallel-size",
    "tp_size": "say --tensor-parallel-size or -tp",
    "enable_auto_tool_choice": _PARSER_IS_FOUND,
    "enable_reasoning": _PARSER_IS_FOUND,
    "enable_lora": _ADAPTERS,
    "lora_modules": _ADAPTERS,
    "block_size": "say --page-size",
    "num_gpu_blocks_override": "say --kv-cache-tokens",
    "mem_fraction_static": "say --gpu-memory-utilization",
    "context_length": "say --max-model-len",
    "chunked_prefill_size": "say --max-num-batched-tokens",
    "max_running_requests": "say --max-num-seqs",
    "scheduling_policy": "a request's priority always counts; for the order of equally urgent ones "
    "say --schedule-policy",
    "swap_space": "say --host-cache-gib",
    "tokenizer_mode": "tokenizers are read from tokenizer.json, the fast form alone",
    "model_path": "say the model without a flag: rayfleet serve MODEL",
    "model": "say the model without a flag: rayfleet serve MODEL",
    "uvicorn_log_level": "say --log-level",
}
"""Options of vLLM and SGLang that do not exist here, by name: the reason, or the option to use
instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """Options of one model besides its engine's: number of workers, names, template, parsers."""

    num_workers: int = 1
    """Worker groups, each with a whole copy of the model."""
    tensor_parallel_placement: Literal["node", "pack", "spread"] = "node"
    """Placement of a worker group's ranks. node: all on one node; pack: on as few nodes as
    possible; spread: on as many as possible. Ranks on different nodes communicate over TCP."""
    served_model_name: str | None = field(
        default=None, metadata={"argparse": {"nargs": "+", "action": "extend"}}
    )
    """Name that clients put into `model`; the last part of the model's path unless given. Further
    ones on the command line are names of the same model."""
    served_model_aliases: tuple[str, ...] = field(default=(), metadata={"flag": None})
    """Further names of the same model, in config files."""
    chat_template: str = ""
    """Jinja template in place of the tokenizer's own: a file on the gateways' nodes, or the
    template itself."""
    generation_config: str = "auto"
    """Source of the sampling parameters that requests do not set: auto for the model's
    generation_config.json, vllm for none, otherwise a folder or Hub repository with that file."""
    tool_call_parser: str = ""
    """Format in which the model writes tool calls: hermes, qwen3_coder, glm45, llama3_json,
    pythonic, mistral, deepseek_v31, harmony, json; none to leave them in the text. Found in its
    chat template unless given."""
    reasoning_parser: str = ""
    """Format in which the model marks its reasoning: think, mistral, harmony; none to leave it in
    the text. Found in its chat template unless given."""

    def __post_init__(self) -> None:
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        if self.num_workers < 1:
            raise ValueError(f"--num-workers must be at least 1, got {self.num_workers}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model of the fleet."""

    fleet: FleetConfig
    """Number of its workers, names, template and parsers."""
    engine: EngineConfig
    """Engine options of each of its worker groups."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """How gateways choose a worker for a request."""
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """How the number of workers follows the load; disabled by default."""

    def __post_init__(self) -> None:
        if self.autoscaling.enabled and self.fleet.num_workers != 1:
            raise ValueError(
                "--num-workers is fixed and --max-workers follows the load: give one of them, with "
                "--min-workers for the fewest"
            )

    @property
    def min_workers(self) -> int:
        """Fewest workers of the model, which is also how many it starts with."""
        return self.autoscaling.min_workers if self.autoscaling.enabled else self.fleet.num_workers

    @property
    def max_workers(self) -> int:
        """Most workers that the model may have at a time."""
        return self.autoscaling.max_workers or self.fleet.num_workers

    @property
    def name(self) -> str:
        """Name that clients put into `model`."""
        return self.fleet.served_model_name or os.path.basename(self.engine.model.rstrip("/"))

    @property
    def deployment(self) -> str:
        """Name of the Serve deployment of the model's workers."""
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.name)
        return f"worker-{safe}"


_METRICS = {"within": "--metrics-config"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Options of the endpoint and of the whole fleet: address, keys, tenants, metrics, logs."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """Port to listen on."""
    ssl_certfile: str = ""
    """PEM file with the endpoint's TLS certificate chain. Clients then connect by HTTPS only; plain
    HTTP unless given."""
    ssl_keyfile: str = ""
    """PEM file with the private key of --ssl-certfile. Only needed if --ssl-certfile does not hold
    the key."""
    api_keys: tuple[str, ...] = field(default=(), repr=False, metadata={"flag": "--api-key"})
    """Key that clients may present as `Authorization: Bearer KEY`; may be given several times.
    Without any key, everyone is let in. A key given by this flag is visible in the list of
    processes."""
    api_key_file: str = ""
    """File with further keys, or folder of such files, on the gateways' nodes: one key per line, or
    TOML with a name, limits and an expiry for each (`rayfleet keys new` prints an entry). Read
    again when it changes, so that keys can be rotated while serving."""
    admin_api_key: str = field(default="", repr=False)
    """Key for /admin, where running workers are changed. It is accepted nowhere else, and /admin
    accepts no API key. Without this key or --admin-api-key-file, /admin is off. The environment
    variable RAYFLEET_ADMIN_API_KEY sets it without showing it in the list of processes."""
    admin_api_key_file: str = ""
    """File of admin keys, in the format of --api-key-file."""
    allowed_origins: tuple[str, ...] = field(default=(), metadata={"separator": ","})
    """Origins whose pages may call this endpoint from a browser (CORS), as `https://host:port`,
    separated by commas, or * for all; none unless given."""
    allowed_hosts: tuple[str, ...] = field(default=(), metadata={"separator": ","})
    """Host names that clients may use in the Host header, separated by commas, or * for any. If
    unset, any name when --host is reachable from other machines; on loopback only localhost. IP
    addresses are always allowed."""
    root_path: str = ""
    """Path prefix of a reverse proxy in front, as /llm. Paths are served with the prefix and
    without it, so the proxy may strip it or not."""
    audit_log: str = ""
    """Folder, on the gateways' nodes, of the audit log: a JSON line per request with its time, the
    key's name, model, status and token counts; nothing of prompts or answers. Empty for none."""
    fairness_key: Literal["auto", "none", "key", "user"] = "auto"
    """Tenants for fair scheduling: among equally urgent requests, those of the tenant that has been
    served least go first. key: a tenant per API key; user: per API key and request field `user`,
    which clients choose freely; none: no fairness; auto: key with several keys, otherwise none."""
    cache_isolation: Literal["auto", "none", "key", "user"] = "auto"
    """Tenants whose prefix caches are kept apart, so that the time to the first token tells nobody
    what others have asked. none: all tenants share one cache; otherwise as in --fairness-key."""
    num_gateways: int = 1
    """Gateway processes, which do HTTP, tokenization and routing."""
    max_gateways: int = 0
    """Maximum number of gateway processes. Above --num-gateways, which is then the minimum, their
    number follows their CPU usage; 0 for a fixed number."""
    responses_store_mib: int = 64
    """Most MiB of responses (/v1/responses) that each gateway process stores, for
    `previous_response_id` and for retrieval by id; 0 stores none."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log lines of all processes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    metrics_host: str = field(default="127.0.0.1", metadata=_METRICS)
    """Address that --metrics-port listens on, on each node; that port asks for no key."""
    metrics_port: int = 0
    """Port on each node with the metrics of all processes there, at /metrics; 0 for none. /metrics
    of the endpoint has those of the node of the gateway that takes the request."""
    metrics_vllm_names: bool = field(default=False, metadata=_METRICS)
    """Export the metrics of the Gateway API's model server protocol (requests running and waiting,
    usage and configuration of the KV cache) under `vllm:` names, too, besides `rayfleet_`."""
    metrics_max_tenants: int = field(default=32, metadata=_METRICS)
    """Tenants (see --fairness-key) that metrics tell apart; further ones count as `other`."""
    otlp_traces_endpoint: str = ""
    """URL to send OpenTelemetry traces to, by OTLP over HTTP; needs the extra `tracing`."""
    startup_retry_s: float = 0.0
    """Seconds for which a gateway or worker retries its start after a failure that may pass: a
    model folder that is not mounted yet, a busy Hub, a rank that died. 0 fails at once; inf retries
    for ever, and is the default in Ray Serve configs, where nobody would start it again."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"--port must be in [1, 65535], got {self.port}")
        if not 0 <= self.metrics_port < 65536 or self.metrics_port == self.port:
            raise ValueError(
                f"--metrics-port must be 0 or a port other than --port, got {self.metrics_port}"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("--ssl-keyfile needs --ssl-certfile: give both")
        if self.metrics_max_tenants < 1:
            name = option_name(self, "metrics_max_tenants")
            raise ValueError(f"{name} must be at least 1, got {self.metrics_max_tenants}")
        if self.admin_api_key and self.admin_api_key in self.api_keys:
            raise ValueError("--admin-api-key is an --api-key too: give it a key of its own")
        if self.admin_api_key_file and self.admin_api_key_file == self.api_key_file:
            raise ValueError("--admin-api-key-file is --api-key-file too: give it its own")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    "--allowed-origins must be as https://host:port, without a path, or *, "
                    f"got {origin!r}"
                )
        for name in self.allowed_hosts:
            if name != "*" and not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"--allowed-hosts must be names without a port, as llm.example, got {name!r}"
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ValueError(f"--root-path must be as /llm, got {self.root_path!r}")
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
    def most_gateways(self) -> int:
        """Maximum number of gateways, autoscaled or not."""
        return max(self.num_gateways, self.max_gateways)


def known_hosts(endpoint: EndpointConfig) -> tuple[str, ...]:
    """Names that requests may have in `Host`, besides IP addresses; empty for any.

    On loopback, names of other hosts come from pages that rebind their own name to this machine.
    """
    if not endpoint.allowed_hosts and not is_loopback(endpoint.host):
        return ()
    return tuple(dict.fromkeys(("localhost", endpoint.host, *endpoint.allowed_hosts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Configuration of a whole fleet: one endpoint and the models behind it."""

    endpoint: EndpointConfig
    """Options of the endpoint."""
    models: tuple[ModelSpec, ...]
    """The models that are served."""

    def __post_init__(self) -> None:
        self.gateway()  # raises ValueError without any model, or where two share a name

    def gateway(self) -> GatewayConfig:
        """The configuration that each gateway gets."""
        routes = tuple(
            ModelRoute(
                name=m.name,
                aliases=m.fleet.served_model_aliases,
                model=m.engine.model,
                revision=m.engine.revision,
                tokenizer=m.engine.tokenizer,
                chat_template=m.fleet.chat_template,
                generation_config=m.fleet.generation_config,
                tool_call_parser=m.fleet.tool_call_parser,
                reasoning_parser=m.fleet.reasoning_parser,
                routing=m.routing,
                on_demand=m.autoscaling.to_zero,
                min_workers=m.min_workers,
                max_workers=m.max_workers,
            )
            for m in self.models
        )
        return GatewayConfig(
            models=routes,
            api_keys=self.endpoint.api_keys,
            api_key_file=self.endpoint.api_key_file,
            admin_api_keys=(self.endpoint.admin_api_key,) if self.endpoint.admin_api_key else (),
            admin_api_key_file=self.endpoint.admin_api_key_file,
            allowed_origins=self.endpoint.allowed_origins,
            allowed_hosts=known_hosts(self.endpoint),
            root_path=self.endpoint.root_path,
            audit_log=self.endpoint.audit_log,
            fairness_key=self.endpoint.fairness_key,
            metrics_max_tenants=self.endpoint.metrics_max_tenants,
            cache_isolation=self.endpoint.cache_isolation,
            responses_store_mib=self.endpoint.responses_store_mib,
            startup_retry_s=self.endpoint.startup_retry_s,
        )

    def node_metrics(self) -> NodeMetricsConfig:
        """Address, port and names of the metrics that each node exports."""
        return NodeMetricsConfig(
            host=self.endpoint.metrics_host,
            port=self.endpoint.metrics_port,
            vllm_names=self.endpoint.metrics_vllm_names,
        )


def serve_config_from_mapping(settings: Mapping[str, Any]) -> ServeConfig:
    """The fleet that a config file or the arguments of `serve deploy` describe.

        host: 0.0.0.0
        api_keys: [secret]
        models:
          - model: org/name          # engine options and fleet options side by side
            num_workers: 2
            tensor_parallel_size: 2

    Raises:
        ValueError: an unknown key, or a value of the wrong kind; the message names it.
    """
    settings = dict(settings)
    models = settings.pop("models", None)
    if not isinstance(models, list) or not models:
        raise ValueError("the configuration needs a list `models:` with at least one model")
    settings = _with_keys_of(os.environ, settings)
    endpoint = dataclass_from_mapping(EndpointConfig, settings, "the configuration")
    return ServeConfig(endpoint=endpoint, models=tuple(_model_spec(model) for model in models))


def _with_keys_of(environment: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the API keys of the environment added, and its admin key if they have none.

    Raises:
        ValueError: the variable for API keys is set but holds none; that would let everyone in.
    """
    found = dict(settings)
    if (text := environment.get(API_KEY)) is not None:
        keys = [key.strip() for key in text.split(",") if key.strip()]
        if not keys:
            raise ValueError(f"{API_KEY} is set but holds no key: unset it to let everyone in")
        found["api_keys"] = [*(found.get("api_keys") or ()), *keys]
    if key := environment.get(ADMIN_API_KEY):
        found.setdefault("admin_api_key", key)
    return found


def dataclass_from_mapping(cls: type[T], settings: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass `cls` with fields from `settings`.

    Raises:
        ValueError: an unknown key or a value of the wrong kind; the message names it and `where`.
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # cls is a dataclass
    unknown = [key for key in settings if key not in known]
    news = [f"{key} is now {RENAMED[key]}" for key in unknown if key in RENAMED]
    gone = REMOVED | REFUSED
    news += [f"{key}: {gone[key]}" for key in unknown if key in gone]
    if news:
        raise ValueError(f"renamed, removed or refused in {where}: {', '.join(news)}")
    if unknown:
        raise ValueError(
            f"unknown in {where}: {', '.join(map(str, unknown))} (known: {', '.join(known)})"
        )
    try:
        return msgspec.convert(dict(settings), cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"in {where}: {error}") from error


def find_demo_model() -> str:
    """Folder of the demo model, which is part of every installation.

    Raises:
        ValueError: the folder is missing.
    """
    folder = Path(__file__).resolve().with_name("demo").resolve()  # a link in the source tree
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"the demo model is not at {folder}: name a model (`rayfleet serve MODEL`), or train "
            "the demo with `make demo-models`"
        )
    return str(folder)


def _model_spec(settings: object) -> ModelSpec:
    if not isinstance(settings, Mapping) or "model" not in settings:
        raise ValueError(f"each entry of `models:` needs a key `model`, got {settings!r}")
    where = f"the options of model {settings['model']}"
    engine = dict(settings)
    fleet, routing, autoscaling = (
        {f.name: engine.pop(f.name) for f in fields(cls) if f.name in engine}
        for cls in (FleetConfig, RoutingConfig, AutoscalingConfig)
    )
    return ModelSpec(
        fleet=dataclass_from_mapping(FleetConfig, fleet, where),
        engine=dataclass_from_mapping(EngineConfig, engine, where),
        routing=dataclass_from_mapping(RoutingConfig, routing, where),
        autoscaling=dataclass_from_mapping(AutoscalingConfig, autoscaling, where),
    )
