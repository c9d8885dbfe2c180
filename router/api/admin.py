"""AdminRoutes: routes for operators, which require an admin API key."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.api.http.account import Account, attach
from router.api.http.auth import failed_attempt
from router.api.http.body import Bodies, Payload
from router.api.openai.long_strings import CutJson
from router.api.openai.protocol import json_object
from router.api.openai.values import check_num_values
from router.errors import ApiError, bad_request
from router.gateway import Gateway
from router.keys import KeyLimits, KeyRing
from router.keys.attempts import FailedAttempts
from worker.protocol.admission import AdmissionChange, AdmissionOptions


class AdminAccess:
    """Checks the admin keys of requests.

    Args:
        keys: admin API keys.
    """

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._limits = KeyLimits()
        self._attempts = FailedAttempts()

    async def authorize(self, request: Request) -> None:
        """Checks the admin key of a request.

        Raises:
            ApiError: 401 if the key is missing or invalid, 403 if the gateway has no admin keys.
        """
        if self._keys.is_empty:
            raise ApiError(
                403,
                "admin routes are disabled: start the gateways with --admin-api-key-file, "
                "--admin-api-key or RAYFLEET_ADMIN_API_KEY",
                code="admin_off",
            )
        entry = self._keys.find(request.scope)
        if entry is None:
            raise await failed_attempt(
                self._attempts, request.scope, "missing or invalid admin API key"
            )
        attach(request.scope, Account(self._limits.of(entry)))


class AdminRoutes:
    """Handlers that read and change the admission rules of workers.

    Args:
        gateway: the gateway of the workers.
        access: checks admin keys.
        bodies: reads request bodies.
    """

    def __init__(self, gateway: Gateway, access: AdminAccess, bodies: Bodies) -> None:
        self._gateway = gateway
        self._access = access
        self._bodies = bodies

    async def admission(self, request: Request) -> Response:
        """GET /admin/admission?model=NAME: the admission rules that have been changed through this
        endpoint. Raises ApiError."""
        await self._access.authorize(request)
        model = self._gateway.model(request.query_params.get("model"))
        return JSONResponse({"model": model.route.name, **model.admission.change.given})

    async def set_admission(self, request: Request) -> Response:
        """POST /admin/admission: changes admission rules for the workers of `model`. Raises
        ApiError.

        The new values apply to all current and future workers until they are changed again.
        Responds with the values and the ids of the workers that received them.
        """
        await self._access.authorize(request)
        async with self._bodies.read(request) as payload:
            fields = await self._gateway.pool.run_if_large(
                lambda: _fields(payload), size=len(payload)
            )
        name = fields.pop("model", None)
        if name is not None and not isinstance(name, str):
            raise bad_request("model must be a string", "model")
        model = self._gateway.model(name)
        try:
            change = AdmissionChange(fields)
        except (ValueError, OverflowError) as error:
            raise bad_request(str(error)) from error
        if not change.given:
            known = ", ".join(option.name for option in dataclasses.fields(AdmissionOptions))
            raise bad_request(f"nothing to change: set at least one of {known}")
        workers = await model.admission.set(change)
        return JSONResponse({"model": model.route.name, **change.given, "workers": workers})


def _fields(payload: Payload) -> dict[str, Any]:
    """Decodes a body to a dict. Raises ApiError (400) if it is malformed or has too many values."""
    text = CutJson(payload)
    check_num_values(text.skeleton)
    return json_object(text)
