"""AdapterRoutes: loads and unloads LoRA adapters at run time, as in vLLM."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from router.api.admin import AdminAccess
from router.api.http.body import Bodies
from router.api.openai.protocol import (
    Body,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    parse_body,
)
from router.errors import bad_request
from router.gateway import Gateway
from router.serving import ServedModel


class AdapterRoutes:
    """Handlers for LoRA adapters, which require an admin key.

    Args:
        gateway: the gateway of the models.
        access: checks admin keys.
        bodies: reads request bodies.
    """

    def __init__(self, gateway: Gateway, access: AdminAccess, bodies: Bodies) -> None:
        self._gateway = gateway
        self._access = access
        self._bodies = bodies

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: registers an adapter with all gateways. Raises ApiError."""
        await self._access.authorize(request)
        body = await self._read(request, LoadAdapterRequest)
        model, name = self._model(body.model), body.lora_name
        owner = self._gateway.owner(name)
        if owner is not None and (owner is not model or name in model.route.names):
            raise bad_request(
                f"{name} is already the name of a model or of another model's adapter: use "
                "another lora_name",
                "lora_name",
            )
        await model.adapters.load(
            name, body.lora_path, model.adapter_checks(), replace=body.load_inplace
        )
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: removes an adapter from all gateways. Raises ApiError."""
        await self._access.authorize(request)
        body = await self._read(request, UnloadAdapterRequest)
        name = body.lora_name
        owner = self._gateway.owner(name)
        model = self._model(body.model) if owner is None or name in owner.route.names else owner
        await model.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def list(self, request: Request) -> Response:
        """GET /admin/lora_adapters: all adapters with their folders, and the workers that have them
        on the device or in host memory. Raises ApiError."""
        await self._access.authorize(request)
        rows = [row for model in self._gateway.models for row in _rows(model)]
        return JSONResponse({"object": "list", "data": rows})

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        async with self._bodies.read(request) as payload:
            return await self._gateway.pool.run_if_large(
                lambda: parse_body(payload, kind), size=len(payload)
            )

    def _model(self, name: str | None) -> ServedModel:
        """The base model that the request names; without a name, the only model with adapters."""
        enabled = [model for model in self._gateway.models if model.route.enable_lora]
        if name is None and len(enabled) == 1:
            return enabled[0]
        model = self._gateway.model(name)
        if not model.route.enable_lora:
            raise bad_request("LoRA adapters are disabled: start the server with --enable-lora")
        return model


def _rows(model: ServedModel) -> list[dict[str, Any]]:
    """One row of the listing per adapter of a model."""
    rows = []
    for name in model.adapters.names:
        ref, loaded = model.adapters.find(name), model.adapters.loaded.get(name)
        version = "" if ref is None else ref.version
        on_device, on_host = [], []
        for worker in model.fleet.workers:
            if (totals := worker.load.adapters) is not None:
                on_device += [worker.worker_id] if version in totals.on_device else []
                on_host += [worker.worker_id] if version in totals.on_host else []
        rows.append(
            {
                "lora_name": name,
                "model": model.route.name,
                "lora_path": None if ref is None else ref.folder,
                "version": version or None,
                "loaded_at": None if loaded is None else _date(loaded.created),
                "on_device": on_device,
                "on_host": on_host,
            }
        )
    return rows


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
