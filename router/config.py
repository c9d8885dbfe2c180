"""GatewayConfig: configuration of a gateway, of its models and of their routing."""

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
"""The rule by which requests belong to one tenant: not at all, by API key, or by key and the
request's `user`; auto is by key if there are several keys, else none."""

_RARE = {"within": "--routing-config"}
"""Metadata of options that are given within --routing-config, and have no flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How gateways choose a worker for a request, and another one when it is lost."""

    routing_policy: PolicyName = "adaptive"
    """Policy that decides which worker takes a request."""
    prefix_score_hit_weight: float = field(default=10.0, metadata=_RARE)
    """prefix-score: weight of each prompt token in the worker's prefix cache."""
    prefix_score_utilisation_weight: float = field(default=100.0, metadata=_RARE)
    """prefix-score: weight of the batch's utilisation, which counts against the worker."""
    prefix_score_kv_free_weight: float = field(default=0.1, metadata=_RARE)
    """prefix-score: weight of each percent of KV pages that is free."""
    prefix_score_batch_room_weight: float = field(default=0.5, metadata=_RARE)
    """prefix-score: weight of each free slot of the batch."""
    explain_routing: bool = False
    """Answer with headers that tell what routing expected, what was achievable and what came of it,
    and count it; up to a millisecond per 128k-token prompt."""
    decision_log: str = field(default="", metadata=_RARE)
    """Folder for logs of all decisions, one per gateway and model, which `bench router --replay`
    runs again under other policies; they hold keyed hashes, no text."""
    decision_log_mib: int = field(default=256, metadata=_RARE)
    """Most MiB of the decision log of one gateway and model; the older half of it goes first."""
    decision_log_key_file: str = field(default="", metadata=_RARE)
    """File, on the gateways' nodes, whose content is the key of the hashes in decision logs: logs
    of several gateways then have names in common. Without it each gateway draws a key that nobody
    learns."""

    max_request_attempts: int = field(default=3, metadata=_RARE)
    """Workers that may be lost with a request, none having brought a token of it, before it ends in
    an error as their likely end; until then it continues at another one with the tokens it has. 1
    ends it with its first worker, tokens or not."""
    no_worker_timeout_s: float = field(default=120.0, metadata=_RARE)
    """Seconds that a request whose worker was lost waits for another, or for that one rebuilt; and
    a new one, where the last worker has left and the next is still loading, or is started on
    demand."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_request_attempts", 1),
            ("decision_log_mib", 1),
            ("no_worker_timeout_s", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{option_name(self, name)} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoute:
    """A served model, as its gateways see it."""

    name: str
    """Name that clients put into `model`."""
    model: str
    """Folder or Hub repository of the checkpoint: tokenizer and chat template are read here."""
    revision: str = ""
    """Branch, tag or commit of the repository; empty for its main branch."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""
    tokenizer: str = ""
    """Folder or Hub repository of another tokenizer than the checkpoint's; empty for its own."""
    chat_template: str = ""
    """Jinja source, or a file with it, in place of the tokenizer's template; empty for that."""
    generation_config: str = "auto"
    """Source of the sampling values for what requests leave open: auto is the checkpoint, vllm
    none, else a folder or Hub repository with a generation_config.json."""
    tool_call_parser: str = ""
    """Format in which the model writes tool calls, see router.replies; empty for what its chat
    template tells, none for not at all."""
    reasoning_parser: str = ""
    """Format in which the model marks reasoning, see router.replies; empty for what its chat
    template tells, none for not at all."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Options of routing."""
    on_demand: bool = False
    """Whether a worker is started for requests that find none: they wait for it, rather than end
    in a 503."""
    min_workers: int = 1
    """Number of workers at the start, and the least later on."""
    max_workers: int = 1
    """Greatest number of workers; equal to `min_workers` without autoscaling."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model that clients may use."""
        return (self.name, *self.aliases)

    @property
    def checkpoint(self) -> str:
        """The checkpoint with its revision, by which its files are found."""
        return at_revision(self.model, self.revision)

    @property
    def tokenizer_checkpoint(self) -> str:
        """Checkpoint whose tokenizer files are read."""
        return self.tokenizer or self.checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Configuration of a gateway process: models, API keys and limits."""

    models: tuple[ModelRoute, ...]
    """All models behind this endpoint."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that clients may present as `Authorization: Bearer KEY`; empty lets everyone in."""
    api_key_file: str = ""
    """File, or folder of files, with further keys and what each may do; see router.keys.KeyFile."""
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that open /admin, and nothing else; without any, and no file of them, it is off."""
    admin_api_key_file: str = ""
    """File, or folder of files, with further admin keys, see router.keys.KeyFile."""

    root_path: str = ""
    """Prefix that a proxy in front puts before all paths, as `/llm`; empty for nothing."""
    allowed_origins: tuple[str, ...] = ()
    """Origins (`https://host:port`, or `*` for all) whose pages may send requests by browser."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may have in `Host`, besides IP addresses; empty or `*` for any."""
    audit_log: str = ""
    """Folder for a line per request: who asked which model, how much, with which outcome."""

    fairness_key: Tenancy = "auto"
    """Parties that share a worker evenly: API keys, or users of API keys; auto: keys, where there
    are several."""
    metrics_max_tenants: int = 32
    """Tenants that metrics distinguish."""
    cache_isolation: Tenancy = "auto"
    """Parties whose prompts share no prefix cache with those of others: as for `fairness_key`."""
    responses_store_mib: int = 64
    """Most MiB of the responses that one gateway process keeps; 0 for none."""
    startup_retry_s: float = 0.0
    """Seconds for which a tokenizer that is not there yet is tried again, inf for ever."""

    def __post_init__(self) -> None:
        names = [name for route in self.models for name in route.names]
        if not names:
            raise ValueError("a gateway needs at least one model")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"model names must differ, served twice: {', '.join(doubles)}")
