"""Gateway: the models of a gateway process, each with tokenizer, workers and counters."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from router.channel import WorkerTransport
from router.config import GatewayConfig, ModelRoute
from router.errors import ApiError, missing_model, unknown_model
from router.fleet import Fleet
from router.metrics.collector import GatewayCollector, Source
from router.metrics.http import HttpStats
from router.peers import ID_PREFIX, Peers
from router.serving import AdapterRegistry, ServedModel, SettingsStore
from router.tokens.defaults import assumed_limits, read_chat_template, recommended_sampling
from router.tokens.encoder import ParityCheck, PromptEncoder
from router.tokens.pool import WorkPool
from worker.protocol.exposition import OPENMETRICS, content_type_for, render
from worker.protocol.retry import StartReport, until_started
from worker.protocol.text.tokenizer import load_tokenizer
from worker.protocol.tracing import Tracing

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.02
"""Seconds between checks of whether the gateway is ready."""


class Gateway:
    """Serves models over their workers, without HTTP (see `router.api.app.create_app`).

    Must be used on one event loop.

    Args:
        config: configuration with the models.
        transports: connections to workers, by model name.
        tracing: creates spans; None if tracing is disabled.
        settings: store shared by a model's gateways, by model name; empty if this gateway is the
            only one.
        adapters: store of adapters loaded at run time, by model name.
        peers: the other gateways; None if there are none.

    Raises:
        ValueError: a model has no transport.
    """

    def __init__(
        self,
        config: GatewayConfig,
        transports: Mapping[str, WorkerTransport],
        tracing: Tracing | None = None,
        settings: Mapping[str, SettingsStore] | None = None,
        peers: Peers | None = None,
        adapters: Mapping[str, SettingsStore] | None = None,
    ) -> None:
        missing = [route.name for route in config.models if route.name not in transports]
        if missing:
            raise ValueError(f"no transport to the workers of {', '.join(missing)}")
        self.config = config
        self.peers = peers or Peers(f"{ID_PREFIX}{secrets.token_hex(6)}")
        self.peers.on_change(self._on_peers_change)
        self.gateway_id = self.peers.own_id
        self.created = int(time.time())
        self.http = HttpStats()
        """Counters of HTTP responses, updated by the API."""
        self._transports = dict(transports)
        self._settings = dict(settings or {})
        self._adapters = dict(adapters or {})
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, ServedModel] = {}
        self.pool = WorkPool(max(2, min(8, os.cpu_count() or 2)))
        """Threads for long bodies and prompts."""
        self.tracing = tracing
        self.gather: Callable[[str], Awaitable[tuple[bytes, str]]] | None = None
        """Collects the metrics of all processes of this node in the format that an Accept header
        requests; returns text and content type. None if only this process has metrics."""
        self.report: StartReport = lambda delay: None
        """Called with a description of what `start` is waiting for."""
        self.delayed: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
        """Returns the failed worker starts that the cluster will retry; None if there is no
        cluster."""

    @property
    def models(self) -> Iterable[ServedModel]:
        """All served models."""
        return self._models.values()

    @property
    def ready(self) -> bool:
        """Whether every model has a ready worker or starts one on demand."""
        models = self._models.values()
        return bool(models) and all(model.ready for model in models)

    async def start(self) -> None:
        """Loads tokenizers and connects to workers. Raises ValueError for a malformed
        checkpoint."""
        for route in self.config.models:
            model = await until_started(
                partial(self._load_aside, route),
                retry_s=self.config.startup_retry_s,
                report=self.report,
            )
            self._models[route.name] = model
            model.fleet.has_other_gateways = self.peers.has_others
            for name in route.names:
                self._names[name] = model
            await model.start()
            logger.info("gateway serving %s", route.name, extra={"model": route.name})

    async def wait_ready(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds until `ready`; returns whether it is."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while not self.ready and clock() < deadline:
            await asyncio.sleep(_READY_POLL_S)
        return self.ready

    async def close(self) -> None:
        """Disconnects from all workers; open requests fail."""
        for model in self._models.values():
            await model.close()
        if self.tracing is not None:
            self.tracing.close()
        self.pool.close()

    def model(self, name: str | None) -> ServedModel:
        """The model with a name; None for the only model.

        Raises:
            ApiError: 404 for an unknown name; 400 for None if there are several models; 503 if the
                name may be that of a LoRA adapter that this gateway could not read yet.
        """
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise missing_model()
        model = self.owner(name)
        if model is None:
            if any(m.route.enable_lora and not m.adapters.is_complete for m in self.models):
                problem = "the LoRA adapters of this fleet are not known yet: try again"
                raise ApiError(503, problem, retry_after_s=1)
            raise unknown_model(name)
        return model

    def owner(self, name: str) -> ServedModel | None:
        """The model that has this name, or an adapter with this name; None if there is none."""
        model = self._names.get(name)
        if model is not None:
            return model
        return next((m for m in self._models.values() if name in m.adapters), None)

    async def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """Text and content type of /metrics: of all processes of the node, or of this one.

        Args:
            accept: Accept header of the scraper.
        """
        if self.gather is not None:
            return await self.gather(accept)
        content_type = content_type_for(accept)
        return self.metrics(content_type), content_type

    def metrics(self, content_type: str) -> bytes:
        """Metrics of this gateway as Prometheus text."""
        sources = [
            Source(name, model.stats, model.fleet, model.adapters.versions)
            for name, model in self._models.items()
        ]
        created = float(self.created) if content_type == OPENMETRICS else None
        collector = GatewayCollector(self.gateway_id, sources, self.http, created)
        return render(collector.collect(), content_type)

    def _on_peers_change(self) -> None:
        for model in self._models.values():
            model.fleet.has_other_gateways = self.peers.has_others

    async def _load_aside(self, route: ModelRoute) -> ServedModel:
        return await self.pool.run(partial(self._load, route), size=0)

    def _load(self, route: ModelRoute) -> ServedModel:
        tokenizer = load_tokenizer(route.tokenizer_checkpoint)
        store = self._adapters.get(route.name)
        fleet = Fleet(route.routing, parity=ParityCheck(tokenizer))
        if route.chat.chat_template:  # after ParityCheck, since workers do not render chats
            tokenizer = tokenizer.with_chat_template(read_chat_template(route.chat.chat_template))
        return ServedModel(
            route,
            self.gateway_id,
            self._transports[route.name],
            tokenizer,
            PromptEncoder(tokenizer, fleet, self.pool, assumed_limits(route.checkpoint)),
            fleet,
            recommended_sampling(route.checkpoint, route.chat.generation_config),
            max_tenants=self.config.tenants.metrics_max_tenants,
            settings=self._settings.get(route.name),
            adapters=AdapterRegistry(route.name, route.lora_modules, store, self.peers),
        )
