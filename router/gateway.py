"""A gateway process: models by name, each with its tokenizer, its workers and its counters."""

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
from router.errors import bad_request, unknown_model
from router.fleet import Fleet
from router.metrics.collector import GatewayCollector, Source
from router.metrics.http import HttpStats
from router.serving import ServedModel, SettingsStore
from router.tokens.defaults import assumed_limits, read_chat_template, recommended_sampling
from router.tokens.encoder import ParityCheck, PromptEncoder
from router.tokens.pool import WorkPool
from worker.wire.exposition import OPENMETRICS, content_type_for, render
from worker.wire.retry import StartReport, until_started
from worker.wire.tokenizer import load_tokenizer
from worker.wire.tracing import Tracing

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.02


class Gateway:
    """Serves the models of `config` over the workers that `transports` reach.

    Knows no HTTP: `router.api.app.create_app(gateway)` does. Lives on one event loop.

    Args:
        config: models and keys.
        transports: by model name.
        tracing: makes spans; None for none.
        settings: by model name, what its gateways share and keep; empty where this is the only one.

    Raises:
        ValueError: a model has no transport.
    """

    def __init__(
        self,
        config: GatewayConfig,
        transports: Mapping[str, WorkerTransport],
        tracing: Tracing | None = None,
        settings: Mapping[str, SettingsStore] | None = None,
    ) -> None:
        missing = [route.name for route in config.models if route.name not in transports]
        if missing:
            raise ValueError(f"no transport reaches the workers of {', '.join(missing)}")
        self.config = config
        self.gateway_id = f"gw-{secrets.token_hex(6)}"
        self.created = int(time.time())
        self.http = HttpStats()
        """Counts the answers of whatever speaks HTTP for this gateway."""
        self._transports = dict(transports)
        self._settings = dict(settings or {})
        self._models: dict[str, ServedModel] = {}
        self._names: dict[str, ServedModel] = {}
        self.pool = WorkPool(max(2, min(8, os.cpu_count() or 2)))
        """Threads that work on long bodies and prompts."""
        self.tracing = tracing
        self.gather: Callable[[str], Awaitable[tuple[bytes, str]]] | None = None
        """Asks all processes of this node for their metrics, in a format that the scraper accepts;
        None where there is no node to ask."""
        self.report: StartReport = lambda delay: None
        """Is called with what `start` waits for."""
        self.delayed: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
        """Asks the cluster which starts have failed and wait for another try; None where there is
        no cluster to ask."""

    @property
    def models(self) -> Iterable[ServedModel]:
        """All served models."""
        return self._models.values()

    @property
    def ready(self) -> bool:
        """Whether every model has a worker that can take requests, or gets one on demand."""
        models = self._models.values()
        return bool(models) and all(model.ready for model in models)

    async def start(self) -> None:
        """Loads tokenizers and attaches to the workers. Raises ValueError for a bad checkpoint."""
        for route in self.config.models:
            model = await until_started(
                partial(self._load_aside, route),
                retry_s=self.config.startup_retry_s,
                report=self.report,
            )
            self._models[route.name] = model
            for name in route.names:
                self._names[name] = model
            await model.start()
            logger.info("gateway serves %s", route.name, extra={"model": route.name})

    async def wait_ready(self, timeout_s: float) -> bool:
        """Waits for `ready`, at most so long; whether it is."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while not self.ready and clock() < deadline:
            await asyncio.sleep(_READY_POLL_S)
        return self.ready

    async def close(self) -> None:
        """Detaches from all workers; requests under way end with an error."""
        for model in self._models.values():
            await model.close()
        if self.tracing is not None:
            self.tracing.close()
        self.pool.close()

    def model(self, name: str | None) -> ServedModel:
        """The model that a client names; it may leave the name out where there is only one.

        Raises:
            ApiError: 404 for an unknown name.
        """
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise bad_request("model is missing: name one of /v1/models", "model")
        model = self._names.get(name)
        if model is None:
            raise unknown_model(name)
        return model

    async def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """The text that /metrics answers, and its content type: this node's metrics, or just its
        own.

        Args:
            accept: the scraper's Accept header.
        """
        if self.gather is not None:
            return await self.gather(accept)
        content_type = content_type_for(accept)
        return self.metrics(content_type), content_type

    def metrics(self, content_type: str) -> bytes:
        """This gateway's own metrics as Prometheus text."""
        sources = [Source(name, model.stats, model.fleet) for name, model in self._models.items()]
        created = float(self.created) if content_type == OPENMETRICS else None
        collector = GatewayCollector(self.gateway_id, sources, self.http, created)
        return render(collector.collect(), content_type)

    async def _load_aside(self, route: ModelRoute) -> ServedModel:
        return await self.pool.run(partial(self._load, route), size=0)

    def _load(self, route: ModelRoute) -> ServedModel:
        tokenizer = load_tokenizer(route.tokenizer_checkpoint)
        fleet = Fleet(route.routing, parity=ParityCheck(tokenizer))
        if route.chat_template:  # workers render no chats: they are compared without it
            tokenizer = tokenizer.with_chat_template(read_chat_template(route.chat_template))
        return ServedModel(
            route,
            self.gateway_id,
            self._transports[route.name],
            tokenizer,
            PromptEncoder(tokenizer, fleet, self.pool, assumed_limits(route.checkpoint)),
            fleet,
            recommended_sampling(route.checkpoint, route.generation_config),
            max_tenants=self.config.metrics_max_tenants,
            settings=self._settings.get(route.name),
        )
