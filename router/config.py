"""Configuration of gateways, their models and routing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from worker.protocol.admission import option_name
from worker.protocol.hub import at_revision

PolicyName = Literal[
    "adaptive", "prefix-score", "least-load", "power-of-two", "round-robin", "session"
]
"""Names of routing policies, see router.fleet.policies."""

Tenancy = Literal["auto", "none", "key", "user"]
"""Assignment of requests to tenants: none, by API key, or by API key and the request's `user`;
auto is by key if there are several keys, otherwise none."""

_RARE = {"within": "--routing-config"}
"""Metadata of options that are keys of --routing-config and have no flag of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """Options for the choice of workers, and for retries when a worker fails."""

    routing_policy: PolicyName = "adaptive"
    """Policy that selects the worker for each request."""
    prefix_score_hit_weight: float = field(default=10.0, metadata=_RARE)
    """prefix-score policy: weight of each prompt token found in the worker's prefix cache."""
    prefix_score_utilisation_weight: float = field(default=100.0, metadata=_RARE)
    """prefix-score policy: weight of the worker's batch utilization, which lowers its score."""
    prefix_score_kv_free_weight: float = field(default=0.1, metadata=_RARE)
    """prefix-score policy: weight of each percent of free KV pages."""
    prefix_score_batch_room_weight: float = field(default=0.5, metadata=_RARE)
    """prefix-score policy: weight of each free slot in the batch."""
    explain_routing: bool = False
    """Report the estimated, best possible and actual outcome of each routing decision in response
    headers and metrics. Takes up to 1 ms per prompt of 128k tokens."""
    decision_log: str = field(default="", metadata=_RARE)
    """Folder for logs of all routing decisions, one per gateway and model, which `python -m
    deploy.benchmarks router --replay` replays under other policies. They contain keyed hashes, no
    text."""
    decision_log_mib: int = field(default=256, metadata=_RARE)
    """Maximum size in MiB of the decision log of one gateway and model; when it is full, the older
    half is deleted."""
    decision_log_key_file: str = field(default="", metadata=_RARE)
    """File on the gateways' nodes with the key of the hashes in decision logs, so that logs of
    several gateways can be combined. If unset, each gateway generates a key that is not stored."""

    max_request_attempts: int = field(default=3, metadata=_RARE)
    """Worker failures a request may be involved in without producing a token before it is failed as
    their probable cause; until then it is resumed on another worker. 1 disables resuming."""
    no_worker_timeout_s: float = field(default=120.0, metadata=_RARE)
    """Seconds that a request waits if no worker is available: after a worker failure, while the
    next worker loads, or while one is started on demand."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_request_attempts", 1),
            ("decision_log_mib", 1),
            ("no_worker_timeout_s", 0),
        ):
            if (value := getattr(self, name)) < minimum:
                raise ValueError(
                    f"{option_name(self, name)} must be at least {minimum}, got {value}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoute:
    """A served model: names, tokenizer, parsers and routing for its gateways."""

    name: str
    """Model name in requests."""
    model: str
    """Folder or Hub repository of the checkpoint, from which tokenizer and chat template are
    read."""
    revision: str = ""
    """Branch, tag or commit of the repository; the main branch if empty."""
    aliases: tuple[str, ...] = ()
    """Additional names of the model."""
    tokenizer: str = ""
    """Folder or Hub repository of a tokenizer that replaces the checkpoint's; empty for the
    checkpoint's."""
    chat_template: str = ""
    """Jinja source or file of a template that replaces the tokenizer's; empty for the
    tokenizer's."""
    generation_config: str = "auto"
    """Source of default sampling parameters: auto for the checkpoint, vllm for none, otherwise a
    folder or Hub repository with a generation_config.json."""
    tool_call_parser: str = ""
    """Parser of the model's tool calls, see router.parsers; detected from the chat template if
    empty, none to disable parsing."""
    reasoning_parser: str = ""
    """Parser of the model's reasoning, see router.parsers; detected from the chat template if
    empty, none to disable parsing."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Routing options."""
    on_demand: bool = False
    """Whether a worker is started for requests that find none: they wait for it instead of failing
    with a 503."""
    min_workers: int = 1
    """Initial and minimum number of workers."""
    max_workers: int = 1
    """Maximum number of workers; equal to `min_workers` without autoscaling."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model that clients may use."""
        return (self.name, *self.aliases)

    @property
    def checkpoint(self) -> str:
        """Checkpoint to load, as NAME or NAME@REVISION."""
        return at_revision(self.model, self.revision)

    @property
    def tokenizer_checkpoint(self) -> str:
        """Checkpoint to load the tokenizer from."""
        return self.tokenizer or self.checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Configuration of a gateway process: models, API keys and limits."""

    models: tuple[ModelRoute, ...]
    """All models served at this endpoint."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """API keys, which clients send as `Authorization: Bearer KEY`; if empty, no key is required."""
    api_key_file: str = ""
    """File, or folder of files, with further API keys and their limits; see router.keys.KeyFile."""
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys for /admin only; without any, and without a file of them, /admin is disabled."""
    admin_api_key_file: str = ""
    """File or folder of files with additional admin keys, see router.keys.KeyFile."""

    root_path: str = ""
    """Path prefix that a reverse proxy adds, such as `/llm`; empty for none."""
    allowed_origins: tuple[str, ...] = ()
    """Origins (`https://host:port`, or `*` for all) whose pages may send requests from a
    browser."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted in `Host`, besides IP addresses; empty or `*` for any."""
    audit_log: str = ""
    """Folder for the audit log: a line per request with its API key, model, token counts and
    outcome."""

    fairness_key: Tenancy = "auto"
    """Tenants among which a worker is shared fairly: API keys, or users of API keys; auto: API keys
    if there are several."""
    metrics_max_tenants: int = 32
    """Maximum number of tenants with metrics of their own."""
    cache_isolation: Tenancy = "auto"
    """Tenants with separate prefix caches, with the values of `fairness_key`."""
    responses_store_mib: int = 64
    """Maximum size in MiB of the responses that one gateway process stores; 0 disables storage."""
    startup_retry_s: float = 0.0
    """Seconds for which loading a missing tokenizer is retried; inf retries indefinitely."""

    def __post_init__(self) -> None:
        names = [name for route in self.models for name in route.names]
        if not names:
            raise ValueError("a gateway needs at least one model")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"duplicate model names: {', '.join(doubles)}")
