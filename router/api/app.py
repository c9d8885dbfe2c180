"""`create_app`: the ASGI application of a gateway."""

from __future__ import annotations

import importlib.metadata
import logging
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.adapters import AdapterRoutes
from router.api.admin import AdminAccess, AdminRoutes
from router.api.anthropic.routes import AnthropicRoutes
from router.api.decisions.routes import DecisionRoutes
from router.api.http.account import account_of
from router.api.http.audit import AuditLog
from router.api.http.auth import RERANK_PATHS, SCORE_PATHS, ApiKeys
from router.api.http.body import Bodies, BodyLimits
from router.api.http.browsers import BrowserGuard
from router.api.http.client_streams import ClientStreams, StreamLimits
from router.api.http.count import AnswerCounter
from router.api.http.parts import PartsApp
from router.api.openai.completions import CompletionRoutes, request_id_of
from router.api.openai.tokenize import TokenRoutes
from router.api.openapi import openapi_document
from router.api.pooling.routes import PoolingRoutes
from router.api.responses.routes import ResponsesRoutes
from router.api.sessions import SessionRoutes
from router.api.unknown_routes import describe_unknown_route
from router.errors import MODEL_NOT_FOUND, ApiError, error_body, error_headers
from router.gateway import Gateway
from router.keys import KeyLimits, KeyRing
from router.metrics.tenants import DEFAULT
from router.metrics.visibility import visible_to
from router.page.routes import PAGE, PAGE_FILES, PageRoutes
from worker.protocol.hub import local_folder
from worker.protocol.limits import Limits

logger = logging.getLogger(__name__)

_MODELS_NAMED = 10
"""Maximum number of models listed in an error about an unknown model."""
EXPOSED_HEADERS = (
    "request-id",
    "retry-after",
    "x-rayfleet-worker",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
)
"""Response headers that pages of other origins may read (CORS)."""


def create_app(
    gateway: Gateway,
    body_limits: BodyLimits | None = None,
    stream_limits: StreamLimits | None = None,
) -> Starlette:
    """Creates the HTTP API of a gateway, which the caller starts and closes on the same event loop.

    Args:
        body_limits: limits on request bodies; None for the defaults.
        stream_limits: limits on clients that read slowly; None for the defaults.

    Raises:
        ValueError: an API key file is unreadable, invalid or empty, or the audit log is not
            writable.
    """
    access = gateway.config.access
    keys = KeyRing(access.api_keys, access.api_key_file)
    admin_keys = KeyRing(
        (access.admin_api_key,) if access.admin_api_key else (), access.admin_api_key_file
    )
    bodies, streams = Bodies(body_limits), ClientStreams(stream_limits)
    app = PartsApp(
        routes=_routes(gateway, bodies, streams, keys, admin_keys),
        exception_handlers={
            ApiError: _ModelNames(gateway).api_error,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        },
    )
    gateway.http.keys_are_stale = lambda: keys.is_stale or admin_keys.is_stale
    if not keys.is_empty:
        app.add_middleware(ApiKeys, keys=keys, limits=KeyLimits(gateway.peers))
    if access.audit_log:
        app.add_middleware(AuditLog, folder=access.audit_log, gateway_id=gateway.gateway_id)
    if access.allowed_origins:  # outside of ApiKeys: CORS preflight requests have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(
        BrowserGuard,
        allowed_hosts=gateway.config.known_hosts,
        allowed_origins=access.allowed_origins,
    )
    # The last one added is the outermost.
    app.add_middleware(PlainPaths, root_path=access.root_path)
    app.add_middleware(AnswerCounter, stats=gateway.http, routes=tuple(app.router.routes))
    return app


def _routes(
    gateway: Gateway, bodies: Bodies, streams: ClientStreams, keys: KeyRing, admin_keys: KeyRing
) -> list[Route]:
    completions = CompletionRoutes(gateway, bodies, streams)
    anthropic = AnthropicRoutes(gateway, bodies, completions)
    responses = ResponsesRoutes(gateway, bodies, completions)
    pooling = PoolingRoutes(gateway, bodies, completions)
    decisions = DecisionRoutes(gateway, bodies, completions)
    tokens = TokenRoutes(gateway, bodies)
    monitor = MonitorRoutes(gateway, keys)
    sessions = SessionRoutes(gateway)
    access = AdminAccess(admin_keys)
    admin = AdminRoutes(gateway, access, bodies)
    adapters = AdapterRoutes(gateway, access, bodies)
    page = PageRoutes(gateway.config.access.root_path)
    return [
        Route(PAGE, page.page),
        Route(f"{PAGE_FILES}{{name}}", page.file),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.complete, methods=["POST"]),
        Route("/v1/messages", anthropic.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.retrieve, methods=["GET"]),
        Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/embeddings", pooling.embed, methods=["POST"]),
        Route("/v2/embed", pooling.embed_cohere, methods=["POST"]),
        Route("/pooling", pooling.pool, methods=["POST"]),
        Route("/classify", pooling.classify, methods=["POST"]),
        *[Route(path, pooling.score, methods=["POST"]) for path in SCORE_PATHS],
        *[Route(path, pooling.rerank, methods=["POST"]) for path in RERANK_PATHS],
        Route("/v1/decisions", decisions.decide, methods=["POST"]),
        Route("/v1/systemone", decisions.systemone, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", monitor.models),
        Route("/v1/models/{name:path}", monitor.model),
        Route("/health", monitor.health),
        Route("/ready", monitor.ready),
        Route("/metrics", monitor.metrics),
        Route("/version", monitor.version),
        Route("/ping", monitor.health, methods=["GET", "POST"]),
        Route("/load", monitor.load),
        Route("/sessions", sessions.sessions),
        Route("/openapi.json", monitor.openapi),
        Route("/admin/admission", admin.admission),
        Route("/admin/admission", admin.set_admission, methods=["POST"]),
        Route("/admin/lora_adapters", adapters.list),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
    ]


class PlainPaths:
    """ASGI middleware that removes a trailing slash and the proxy's prefix from the path.

    The prefix may be absent, since some proxies remove it themselves. This middleware must wrap
    middleware that compares paths, such as ApiKeys.

    Args:
        app: the wrapped application.
        root_path: the proxy's prefix, such as `/llm`; empty if there is none.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request with its normalized path."""
        path = scope.get("path", "")
        plain = path
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            plain = path[len(self._root_path) :]
        plain = plain.rstrip("/") or "/"
        if plain != path:
            # Changed in place, since AnswerCounter, outside of this, uses it too.
            scope["path"] = plain
        await self._app(scope, receive, send)


class MonitorRoutes:
    """Handlers for the gateway's state: models, health, load, metrics.

    Args:
        keys: API keys that give access to the details of /ready; if there are no keys, all requests
            get the details.
    """

    def __init__(self, gateway: Gateway, keys: KeyRing) -> None:
        self._gateway = gateway
        self._keys = keys
        self._document = openapi_document(gateway.config.access.root_path)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the models that the key may use."""
        account = account_of(request)
        cards = [
            self._card(name) for model in self._gateway.models for name in account.names(model)
        ]
        names = [card["id"] for card in cards] or [None]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": cards, **pages})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME: one model. Raises ApiError (404)."""
        name = str(request.path_params["name"])
        account_of(request).permitted(self._gateway, name)
        return JSONResponse(self._card(name))

    async def health(self, _: Request) -> Response:
        """GET /health, GET and POST /ping: responds while the process is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 if every model has a ready worker or starts one on demand; otherwise 503.

        Requests with an API key also get the models without a worker, and the failed starts that
        will be retried. Errors of these starts may contain paths and names of nodes.
        """
        if self._gateway.ready:
            return JSONResponse({"status": "ready"})
        if not (self._keys.is_empty or self._keys.find(request.scope) is not None):
            return JSONResponse({"status": "not ready"}, status_code=503)
        waiting = [model.route.name for model in self._gateway.models if not model.ready]
        body: dict[str, Any] = {"status": "not ready", "models": waiting}
        if self._gateway.delayed is not None:
            body["delayed"] = await self._gateway.delayed()
        return JSONResponse(body, status_code=503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: metrics as Prometheus text.

        Keys without the monitoring permission get no series of other tenants, or of models that
        they may not use.
        """
        body, content_type = await self._gateway.scrape(request.headers.get("accept", ""))
        key = account_of(request).key
        if key is not None and not key.monitoring:
            names = {r.name for r in self._gateway.config.models if key.may_use(*r.names)}
            adapters = [
                name
                for model in self._gateway.models
                for name in model.adapters.names
                if key.may_use(name)
            ]
            models = names if key.models else None
            body = visible_to(body, {key.name, DEFAULT}, models, adapters)
        return Response(body, media_type=None, headers={"content-type": content_type})

    async def version(self, _: Request) -> Response:
        """GET /version: the version of the package."""
        return JSONResponse({"version": importlib.metadata.version("rayfleet")})

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json: the OpenAPI document."""
        return Response(self._document, media_type="application/json")

    async def load(self, request: Request) -> Response:
        """GET /load: number of open completions on this gateway, per model and in total.

        Only models that the key may use are counted.
        """
        account = account_of(request)
        models = {
            model.route.name: model.num_open
            for model in self._gateway.models
            if account.may_use(model.route)
        }
        return JSONResponse({"server_load": sum(models.values()), "models": models})

    def _card(self, name: str) -> dict[str, Any]:
        model = self._gateway.model(name)
        info = model.fleet.info
        kind: dict[str, Any] = {}
        if info is not None and info.block_size > 1:
            kind["diffusion_block_size"] = info.block_size
        if (pooling := None if info is None else info.pooling) is not None:
            name_of_size = "embedding_size" if pooling.task == "embed" else "num_labels"
            kind |= {"task": pooling.task, name_of_size: pooling.size}
        max_tokens = None if info is None else Limits.of(info).max_tokens
        root = model.route.name if local_folder(model.route.model) else model.route.model
        if name in model.adapters:
            root = name  # the folder is shown to administrators only
        created = self._gateway.created
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": created,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "owned_by": "rayfleet",
            "root": root,
            "parent": model.route.name if name in model.adapters else None,
            "max_model_len": info.max_model_len if info is not None else None,
            "context_length": max_tokens,
            "max_output_tokens": max_tokens - 1 if max_tokens and pooling is None else None,
            **kind,
        }


class _ModelNames:
    """Error handler that adds the models that the key may use to errors about an unknown model."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def api_error(self, request: Request, error: Exception) -> Response:
        """The response to an ApiError."""
        assert isinstance(error, ApiError)
        if error.code == MODEL_NOT_FOUND:
            error.message += f" {self._hint(request)}"
        return await _api_error(request, error)

    def _hint(self, request: Request) -> str:
        account = account_of(request)
        names = [name for model in self._gateway.models for name in account.names(model)]
        if not names:
            return "This API key may not use any model."
        more = len(names) - _MODELS_NAMED
        rest = f" and {more} more (GET /v1/models)" if more > 0 else ""
        return f"Available: {', '.join(names[:_MODELS_NAMED])}{rest}."


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request_id = request_id_of(request)
    body = error_body(error, request.scope["path"], request_id)
    return Response(body, status_code=error.status, headers=error_headers(error, request_id))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail or HTTPStatus(error.status_code).phrase
    if error.status_code == 404:
        paths = [route.path for route in request.app.routes]
        message = describe_unknown_route(request.url.path, paths)
    response = await _api_error(request, ApiError(error.status_code, message))
    if error.status_code == 405:
        # Methods of all routes with this path: Starlette lists only those of the first route.
        methods = {
            method
            for route in request.app.routes
            if route.matches(request.scope)[0] != Match.NONE
            for method in route.methods
        }
        response.headers["allow"] = ", ".join(sorted(methods))
    return response


async def _unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("unexpected error", exc_info=error)
    return await _api_error(request, ApiError(500, "internal server error"))
