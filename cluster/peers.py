"""PeerTransport of a Ray cluster: sends calls between gateways over Ray Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.serve._private.default_impl import create_router
from ray.serve.handle import DeploymentHandle

from cluster.pinning import PinnedRouter
from cluster.transport import PinnedCall
from cluster.workers import WORKERS
from router.peers import ID_PREFIX


class RayPeers:
    """Transport to the replicas of the gateways' deployment.

    Args:
        deployment: name of the deployment.
        application: name of its Serve application.
    """

    def __init__(self, deployment: str, application: str) -> None:
        handle: DeploymentHandle[Any] = DeploymentHandle(
            deployment, application, _create_router=_create_pinned_router
        )
        by_value = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="noop"
        )
        self._call = by_value.answer_peer
        self._stream = by_value.options(stream=True).stream_to_peer
        self._replicas = WORKERS[deployment]
        # HAZARD: Serve cancels a call together with the HTTP request in whose context it is made.
        # Calls shared by several requests must outlive each of them.
        self._context = contextvars.copy_context()
        self._first_call: asyncio.Task[None] | None = None

    def watch(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with the IDs of all gateways, now and whenever they change."""
        self._replicas.listen(lambda ids: on_change(tuple(ID_PREFIX + name for name in ids)))
        if self._first_call is None:
            self._first_call = asyncio.create_task(self._wake_router())

    async def call(self, peer_id: str, request: bytes) -> bytes:
        """Sends a PeerRequest; returns the response. Raises ConnectionError if the call fails."""
        name = peer_id.removeprefix(ID_PREFIX)
        with PinnedCall(self._replicas, name) as call:
            response: bytes = await call.track(
                self._context.run(lambda: self._call.remote(request=request, peer_id=name))
            )
        return response

    async def stream(self, peer_id: str, request: bytes) -> AsyncIterator[bytes]:
        """Sends a PeerRequest; yields response parts. Raises ConnectionError if the call fails."""
        name = peer_id.removeprefix(ID_PREFIX)
        with PinnedCall(self._replicas, name) as call:
            stream = call.track(
                self._context.run(lambda: self._stream.remote(request=request, peer_id=name))
            )
            async for item in stream:
                # A draining gateway is no longer in the set, but still finishes its responses.
                call.keep_open()
                yield item

    async def _wake_router(self) -> None:
        """Makes a call to any gateway, since Serve only then creates the handle's router, which
        tracks the replicas."""
        with contextlib.suppress(Exception):
            await self._context.run(lambda: self._call.remote(request=b"", peer_id=""))


def _create_pinned_router(**arguments: Any) -> Any:
    """Creates the router of a handle, with PinnedRouter in place of the deployment's router.

    Behind HAProxy, Serve rejects a router class in a deployment's configuration, since HAProxy
    would not use it. The class is therefore only set for the handle.
    """
    router = create_router(**arguments, request_router_class=PinnedRouter)
    # HAZARD: the class in the deployment's configuration, which arrives later, replaces this one
    # unless an instance exists by then. Reading this property creates it.
    assert router._asyncio_router.request_router is not None
    return router
