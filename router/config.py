"""GatewayConfig: configuration of a gateway, its models and their routing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from worker.protocol.hub import at_revision
from worker.protocol.options import option_name

PolicyName = Literal[
    "adaptive", "prefix-score", "least-load", "power-of-two", "round-robin", "session"
]
"""Names of routing policies, see router.fleet.policies."""

Tenancy = Literal["auto", "none", "key", "user"]
"""How requests are grouped into tenants: not at all, by API key, or by key and the request's
`user`; auto is by key if there are several keys, else none."""

_RARE = {"within": "--routing-config"}
"""Metadata of options without a flag, which are set within --routing-config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How gateways choose a worker for a request, and recover if it fails."""

    routing_policy: PolicyName = "adaptive"
    """Policy that chooses a worker for each request."""
    prefix_score_hit_weight: float = field(default=10.0, metadata=_RARE)
    """prefix-score: weight of each prompt token found in the worker's prefix cache."""
    prefix_score_utilisation_weight: float = field(default=100.0, metadata=_RARE)
    """prefix-score: weight of the batch utilisation, which is subtracted from the score."""
    prefix_score_kv_free_weight: float = field(default=0.1, metadata=_RARE)
    """prefix-score: weight of each percent of free KV pages."""
    prefix_score_batch_room_weight: float = field(default=0.5, metadata=_RARE)
    """prefix-score: weight of each free batch slot."""
    explain_routing: bool = False
    """Add response headers and metrics that compare the predicted, the best possible and the actual
    cache hits of each routing decision. Takes up to 1 ms per 128k-token prompt."""
    decision_log: str = field(default="", metadata=_RARE)
    """Folder for logs of all routing decisions, one per gateway and model, for
    `python -m deploy.benchmarks router --replay`. Logs contain keyed hashes, no text."""
    decision_log_mib: int = field(default=256, metadata=_RARE)
    """Maximum size of each gateway's decision log per model, in MiB; the older half is deleted."""
    decision_log_key_file: str = field(default="", metadata=_RARE)
    """File on the gateways' nodes with the key of the hashes in decision logs, so that logs of
    several gateways can be correlated. By default each gateway generates a secret key."""

    max_session_wait_s: float = field(default=0.0, metadata=_RARE)
    """Maximum seconds that a new agent session waits while the KV caches are full with the contexts
    of live sessions, such as 600. 0 disables the wait; see `fleet/session_gate.py`."""
    max_request_attempts: int = field(default=3, metadata=_RARE)
    """Worker failures a request may be involved in without producing a token before it is failed as
    their probable cause; until then it is resumed on another worker. 1 disables retries."""
    no_worker_timeout_s: float = field(default=120.0, metadata=_RARE)
    """Seconds a request waits for a worker if its worker failed, or if none is left and another is
    loading or started on demand; then it fails with a 503."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_request_attempts", 1),
            ("decision_log_mib", 1),
            ("max_session_wait_s", 0),
            ("no_worker_timeout_s", 0),
        ):
            if (value := getattr(self, name)) < minimum:
                raise ValueError(
                    f"{option_name(self, name)} must be at least {minimum}, got {value}"
                )


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
    """Additional names of the same model."""
    tokenizer: str = ""
    """Folder or Hub repository of the tokenizer; defaults to the checkpoint's."""
    chat_template: str = ""
    """Chat template as Jinja source or file; defaults to the tokenizer's."""
    generation_config: str = "auto"
    """Source of default sampling parameters: auto for the checkpoint, vllm for vLLM's defaults, or
    a folder or Hub repository with a generation_config.json."""
    tool_call_parser: str = ""
    """Format of the model's tool calls, see router.parsers; detected from the chat template by
    default, none disables parsing."""
    reasoning_parser: str = ""
    """Format of the model's reasoning, see router.parsers; detected from the chat template by
    default, none disables parsing."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Routing options."""
    on_demand: bool = False
    """Whether requests that find no worker start one and wait for it, instead of failing with a
    503."""
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
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that clients may send as `Authorization: Bearer KEY`; empty disables authentication."""
    api_key_file: str = ""
    """File or folder of files with additional keys and their permissions; see
    router.keys.KeyFile."""
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys for the /admin routes only, which are disabled without admin keys."""
    admin_api_key_file: str = ""
    """File or folder of files with additional admin keys, see router.keys.KeyFile."""

    root_path: str = ""
    """Prefix that a proxy in front adds to all paths, such as `/llm`; empty for none."""
    allowed_origins: tuple[str, ...] = ()
    """Origins (`https://host:port`, or `*` for all) whose pages may send requests from browsers."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names allowed in the `Host` header, besides IP addresses; empty or `*` allows any."""
    audit_log: str = ""
    """Folder for the audit log: a line per request with API key, model, token counts and status."""

    fairness_key: Tenancy = "auto"
    """What shares a worker fairly: API keys, or users of API keys. auto: API keys, if there are
    several."""
    metrics_max_tenants: int = 32
    """Maximum number of tenants that metrics distinguish."""
    cache_isolation: Tenancy = "auto"
    """What gets a prefix cache of its own; values as for `fairness_key`."""
    responses_store_mib: int = 64
    """Maximum MiB of stored responses per gateway process; 0 disables the store."""
    startup_retry_s: float = 0.0
    """Seconds to retry loading a tokenizer that is not available yet; inf for ever."""

    def __post_init__(self) -> None:
        names = [name for route in self.models for name in route.names]
        if not names:
            raise ValueError("a gateway needs at least one model")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"model names must be unique; duplicates: {', '.join(doubles)}")
