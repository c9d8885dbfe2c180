"""SessionRoutes: GET /sessions, the agent sessions of all gateways of the fleet."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.api.http.account import Account, account_of
from router.errors import ApiError
from router.fleet import ListedSession, SessionList
from router.gateway import Gateway
from router.serving import ServedModel
from worker.protocol.analyzed import analyzed

METHOD = "sessions"
TIMEOUT_S = 1.0
"""Timeout in seconds of a call to another gateway, which takes 1 to 5 ms."""
MAX_LISTED = 64
"""Maximum number of sessions listed per model."""

_RANKS = {"running": 0, "waiting": 1, "idle": 2}
"""States of a session, in order of precedence: a session served by several gateways is shown in the
first of its states."""

SessionLists = dict[str, SessionList]
"""Sessions of a gateway by model."""


class SessionRoutes:
    """Handler that lists agent sessions with their states, context tokens and workers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._peers = gateway.peers
        self._peers.handle_call(METHOD, self._handle)

    async def sessions(self, request: Request) -> Response:
        """GET /sessions: waiting and live sessions of models with a session gate.

        Requires a key with the monitoring permission if there are several keys. Gateways that do
        not respond in time are omitted. A session that several gateways serve is listed once, but
        counted by each of them. Raises ApiError (403).
        """
        account = account_of(request)
        _check_monitoring(account)
        others = sorted(self._peers.ids - {self._peers.own_id})
        answers = await asyncio.gather(*map(self._call, others))
        lists = defaultdict[str, list[SessionList]](list)
        for answer in (self._own(), *answers):
            for name, sessions in answer.items():
                lists[name].append(sessions)
        models = [
            model
            for model in self._gateway.models
            if account.may_use(model.route) and model.route.name in lists
        ]
        return JSONResponse(
            {
                "object": "list",
                "models": [_summary(model, lists[model.route.name]) for model in models],
                "data": [row for model in models for row in _rows(model, lists[model.route.name])],
            }
        )

    def _own(self) -> SessionLists:
        found = {model.route.name: model.sessions(MAX_LISTED) for model in self._gateway.models}
        return {name: sessions for name, sessions in found.items() if sessions is not None}

    async def _call(self, peer_id: str) -> SessionLists:
        """Sessions of another gateway; empty if it does not respond."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._peers.call(peer_id, METHOD, b"")
        except (ConnectionError, TimeoutError):
            return {}
        return msgspec.msgpack.decode(answer, type=analyzed(SessionLists))

    async def _handle(self, _: bytes) -> bytes:
        """Handles a call from another gateway."""
        return msgspec.msgpack.encode(self._own())


def _check_monitoring(account: Account) -> None:
    """Raises ApiError (403) if the key does not give access to the sessions of other keys."""
    key = account.key
    if key is not None and not key.monitoring and account.num_keys > 1:
        raise ApiError(
            403,
            "this API key may not list sessions: it has no `monitoring = true` in the key file",
            code="monitoring_required",
        )


def _summary(model: ServedModel, lists: Sequence[SessionList]) -> dict[str, Any]:
    workers = [worker for worker in model.fleet.workers if worker.ready]
    return {
        "id": model.route.name,
        "waiting": sum(sessions.num_waiting for sessions in lists),
        "live": sum(sessions.num_live for sessions in lists),
        "live_tokens": sum(worker.load.session_tokens for worker in workers),
        "cache_tokens": sum(
            worker.load.num_total_pages * worker.info.page_size
            for worker in workers
            if worker.info is not None
        ),
    }


def _rows(model: ServedModel, lists: Sequence[SessionList]) -> list[dict[str, Any]]:
    """Sessions of all gateways: waiting ones, oldest first, then the others, largest first."""
    latest = dict[int, ListedSession]()
    rows = [row for sessions in lists for row in sessions.sessions]
    for row in sorted(rows, key=lambda row: (_RANKS[row.state], row.state_s)):
        latest.setdefault(row.key, row)
    waiting = [row for row in latest.values() if row.state == "waiting"]
    live = [row for row in latest.values() if row.state != "waiting"]
    waiting.sort(key=lambda row: row.age_s, reverse=True)
    live.sort(key=lambda row: row.tokens, reverse=True)
    return [_row(model, row) for row in [*waiting, *live][:MAX_LISTED]]


def _row(model: ServedModel, session: ListedSession) -> dict[str, Any]:
    return {
        "model": model.route.name,
        "session": session.session,
        "state": session.state,
        "state_s": round(session.state_s, 1),
        "age_s": round(session.age_s, 1),
        "worker": session.worker,
        "tokens": session.tokens,
        "turns": session.turns,
    }
