"""Routes that change how a running fleet serves; protected by the API keys like all others."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.api.body import read_body
from router.errors import bad_request
from router.gateway import Gateway
from worker.wire.admission import AdmissionChange, AdmissionOptions


class AdminRoutes:
    """What operators call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def admission(self, request: Request) -> Response:
        """POST /admin/admission: `model`, and new values of the options of admission.

        They hold for all workers of the model, those that this gateway attaches later included.
        Returns the values and the workers that were told. Raises ApiError.
        """
        try:
            fields: Any = msgspec.json.decode(await read_body(request))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise bad_request("the body must be a JSON object")
        name = fields.pop("model", None)
        if name is not None and not isinstance(name, str):
            raise bad_request("model must be a string", "model")
        model = self._gateway.model(name)
        try:
            change = msgspec.convert(fields, AdmissionChange)
            change.applied_to(AdmissionOptions())
        except ValueError as error:
            raise bad_request(str(error)) from error
        if not change.given():
            known = ", ".join(AdmissionChange.__struct_fields__)
            raise bad_request(f"nothing to change: give one of {known}")
        workers = model.set_admission(change)
        return JSONResponse({"model": model.route.name, **change.given(), "workers": workers})
