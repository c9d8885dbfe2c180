"""GatewayConfig: configuration of a gateway, its models and their routing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from router.parsers import check_parsers
from worker.protocol.hub import at_revision
from worker.protocol.options import group, option_name

PolicyName = Literal[
    "adaptive", "prefix-score", "least-load", "power-of-two", "round-robin", "session"
]
"""Names of routing policies (see router.fleet.policies)."""

Tenancy = Literal["auto", "none", "key", "user"]
"""How requests are grouped into tenants: not at all, by API key, or by key and the request's
`user`. `auto` means by key if there are several keys, otherwise not at all."""

_RARE = {"within": "--routing-config"}
"""Metadata of options that have no flag and are set with --routing-config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixScoreConfig:
    """Weights of the policy prefix-score."""

    hit_weight: float = field(default=10.0, metadata=_RARE | {"option": "prefix_score_hit_weight"})
    """prefix-score: weight of each prompt token found in the worker's prefix cache."""
    utilisation_weight: float = field(
        default=100.0, metadata=_RARE | {"option": "prefix_score_utilisation_weight"}
    )
    """prefix-score: weight of the batch utilization, which is subtracted from the score."""
    kv_free_weight: float = field(
        default=0.1, metadata=_RARE | {"option": "prefix_score_kv_free_weight"}
    )
    """prefix-score: weight of each percent of free KV pages."""
    batch_room_weight: float = field(
        default=0.5, metadata=_RARE | {"option": "prefix_score_batch_room_weight"}
    )
    """prefix-score: weight of each free batch slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionLogConfig:
    """Logs of routing decisions."""

    folder: str = field(default="", metadata=_RARE | {"option": "decision_log"})
    """Folder for logs of all routing decisions, one per gateway and model, for
    `python -m deploy.benchmarks router --replay`. Logs contain keyed hashes, no text."""
    max_mib: int = field(default=256, metadata=_RARE | {"option": "decision_log_mib"})
    """Maximum size of each gateway's decision log per model, in MiB; the older half is deleted."""
    key_file: str = field(default="", metadata=_RARE | {"option": "decision_log_key_file"})
    """File on the gateways' nodes with the key of the hashes in decision logs, so that logs of
    several gateways can be correlated. By default each gateway generates a secret key."""

    def __post_init__(self) -> None:
        if self.max_mib < 1:
            name = option_name(self, "decision_log_mib")
            raise ValueError(f"{name} must be at least 1, got {self.max_mib}")

    @property
    def enabled(self) -> bool:
        """Whether decisions are logged."""
        return bool(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """Routing options of gateways: worker selection, and recovery from worker failures."""

    routing_policy: PolicyName = "adaptive"
    """Policy that chooses a worker for each request."""
    explain_routing: bool = False
    """Add response headers and metrics that compare the predicted, the best possible and the actual
    cache hits of each routing decision. Takes up to 1 ms per 128k-token prompt."""
    prefix_score: PrefixScoreConfig = field(default_factory=PrefixScoreConfig, metadata=group())
    """Weights of the policy prefix-score."""
    decision_log: DecisionLogConfig | None = field(default=None, metadata=group())
    """Logs of all routing decisions; None if they are disabled."""

    max_session_wait_s: float = field(default=0.0, metadata=_RARE)
    """Maximum seconds that a new or paused agent session waits while the contexts of live sessions
    fill the KV caches, such as 600. 0 disables waiting."""
    max_request_attempts: int = field(default=3, metadata=_RARE)
    """Worker failures a request may be involved in without producing a token before it is failed as
    their probable cause; until then it is resumed on another worker. 1 disables retries."""
    no_worker_timeout_s: float = field(default=120.0, metadata=_RARE)
    """Seconds that a request waits for a worker if its worker failed, or if no worker is left and
    another one is loading or started on demand. After that it fails with a 503."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_request_attempts", 1),
            ("max_session_wait_s", 0),
            ("no_worker_timeout_s", 0),
        ):
            if (value := getattr(self, name)) < minimum:
                raise ValueError(
                    f"{option_name(self, name)} must be at least {minimum}, got {value}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """Chat template, default sampling parameters and output parsers of a model."""

    chat_template: str = ""
    """Jinja chat template that replaces the tokenizer's: a file on the gateways' nodes, or the
    template itself."""
    generation_config: str = "auto"
    """Source of the default sampling parameters: auto for the model's generation_config.json, vllm
    for vLLM's defaults, otherwise a folder or Hub repository with that file."""
    tool_call_parser: str = ""
    """Parser for the model's tool calls: hermes, qwen3_coder, glm45, kimi_k2, minimax_m2, mistral,
    llama3_json, harmony (the error for an unknown name lists all), or none to leave calls in the
    text. Detected from the chat template if unset."""
    reasoning_parser: str = ""
    """Parser for the model's reasoning: think, mistral, seed_oss, gemma4, harmony (the error for an
    unknown name lists all), or none to leave it in the text. Detected from the chat template if
    unset."""

    def __post_init__(self) -> None:
        check_parsers(self.tool_call_parser, self.reasoning_parser)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessConfig:
    """Keys, hosts and origins that an endpoint accepts, its path, and the audit log."""

    api_keys: tuple[str, ...] = field(default=(), repr=False, metadata={"flag": "--api-key"})
    """API key that clients must send as `Authorization: Bearer KEY`; may be repeated. If there are
    no keys, anyone has access. The flag is visible in the process list: prefer RAYFLEET_API_KEY or
    --api-key-file."""
    api_key_file: str = ""
    """File, or folder of files, with API keys on the gateways' nodes: one key per line, or TOML
    with a name, limits and an expiry for each (`rayfleet keys new` prints an entry). Reloaded when
    it changes, so that keys can be rotated while serving."""
    admin_api_key: str = field(default="", repr=False)
    """Key for /admin and for loading LoRA adapters, which accept no other key. The flag is visible
    in the process list, unlike the environment variable RAYFLEET_ADMIN_API_KEY. These routes are
    disabled unless one of the two or --admin-api-key-file is set."""
    admin_api_key_file: str = ""
    """File of admin keys, in the format of --api-key-file."""
    allowed_origins: tuple[str, ...] = field(default=(), metadata={"separator": ","})
    """Origins (`https://host:port`, separated by commas) whose pages may call this endpoint from a
    browser (CORS), or * for all; none by default."""
    allowed_hosts: tuple[str, ...] = field(default=(), metadata={"separator": ","})
    """Host names accepted in the Host header, separated by commas, or * for any; IP addresses are
    always accepted. By default only localhost if --host is a loopback address, otherwise any."""
    root_path: str = ""
    """Path prefix of a reverse proxy in front, such as /llm. Requests are accepted with and without
    it, whether or not the proxy strips it."""
    audit_log: str = ""
    """Folder on the gateways' nodes for the audit log: a JSON line per request with time, key name,
    model, status and token counts, but no prompts or outputs. Disabled if empty."""

    def __post_init__(self) -> None:
        if self.admin_api_key and self.admin_api_key in self.api_keys:
            raise ValueError("--admin-api-key must differ from every --api-key")
        if self.admin_api_key_file and self.admin_api_key_file == self.api_key_file:
            raise ValueError("--admin-api-key-file must differ from --api-key-file")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    "--allowed-origins must be * or of the form https://host:port, without a "
                    f"path, got {origin!r}"
                )
        for name in self.allowed_hosts:
            if name != "*" and not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    "--allowed-hosts must be * or host names without a port, such as "
                    f"llm.example, got {name!r}"
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ValueError(f"--root-path must be a path such as /llm, got {self.root_path!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantConfig:
    """Options for grouping requests into tenants."""

    fairness_key: Tenancy = "auto"
    """Tenants for fair scheduling: among requests of equal priority, those of the tenant that was
    served least so far are scheduled first. key: a tenant per API key; user: per API key and
    request field `user`, which clients set freely; none: disabled; auto: key if there are several
    keys, otherwise none."""
    cache_isolation: Tenancy = "auto"
    """Tenants with separate prefix caches, so that the time to first token does not reveal other
    tenants' prompts. none: all tenants share one cache; other values as in --fairness-key."""
    metrics_max_tenants: int = field(default=32, metadata={"within": "--metrics-config"})
    """Maximum number of tenants (see --fairness-key) with separate metrics; further ones are
    counted as `other`."""

    def __post_init__(self) -> None:
        if self.metrics_max_tenants < 1:
            name = option_name(self, "metrics_max_tenants")
            raise ValueError(f"{name} must be at least 1, got {self.metrics_max_tenants}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoute:
    """A served model from the gateways' point of view."""

    name: str
    """Model name in requests."""
    model: str
    """Folder or Hub repository of the checkpoint, with the tokenizer and chat template."""
    revision: str = ""
    """Branch, tag or commit of the repository; empty for its main branch."""
    aliases: tuple[str, ...] = ()
    """Additional names of the model."""
    tokenizer: str = ""
    """Folder or Hub repository of the tokenizer; defaults to the checkpoint's."""
    chat: ChatConfig = field(default_factory=ChatConfig, metadata=group())
    """Chat template, default sampling parameters and output parsers."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Routing options."""
    enable_lora: bool = False
    """Whether the workers serve LoRA adapters."""
    lora_modules: tuple[str, ...] = ()
    """Names of the adapters in the workers' configuration."""
    on_demand: bool = False
    """Whether requests that find no worker start one and wait for it, instead of failing with a
    503."""
    min_workers: int = 1
    """Initial and minimum number of workers."""
    max_workers: int = 1
    """Maximum number of workers; equal to `min_workers` if autoscaling is disabled."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model that clients may use."""
        return (self.name, *self.aliases)

    @property
    def checkpoint(self) -> str:
        """The checkpoint with its revision."""
        return at_revision(self.model, self.revision)

    @property
    def tokenizer_checkpoint(self) -> str:
        """Checkpoint that the tokenizer is loaded from."""
        return self.tokenizer or self.checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Configuration of a gateway process: models, API keys and limits."""

    models: tuple[ModelRoute, ...]
    """All models of this endpoint."""
    access: AccessConfig = field(default_factory=AccessConfig, metadata=group())
    """Keys, origins, path and audit log."""
    known_hosts: tuple[str, ...] = ()
    """Names accepted in the Host header besides IP addresses: `allowed_hosts` and, if the API
    listens on loopback, the local names. Empty for any."""
    tenants: TenantConfig = field(default_factory=TenantConfig, metadata=group())
    """How requests are grouped into tenants."""
    responses_store_mib: int = 64
    """Maximum size of the stored responses per gateway process, in MiB; 0 disables the store."""
    startup_retry_s: float = 0.0
    """Seconds to retry loading a tokenizer that is not available yet; inf retries indefinitely."""

    def __post_init__(self) -> None:
        names = [name for route in self.models for name in (*route.names, *route.lora_modules)]
        if not names:
            raise ValueError("a gateway needs at least one model")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"model names must be unique; duplicates: {', '.join(doubles)}")
