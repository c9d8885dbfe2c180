"""Registry of the running replicas of workers and gateways, by deployment, as known to this
process.

It is a separate module because Ray Serve pickles a request router's module by value: the router
(`cluster.pinning`) and the transport (`cluster.transport`) would not share that module's globals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final


class WorkerSet:
    """IDs of one deployment's running replicas, with change listeners.

    Not thread-safe: router and transports run on the gateway's single event loop
    (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0).
    """

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()
        self._listeners: list[Callable[[tuple[str, ...]], None]] = []

    def replace(self, ids: tuple[str, ...]) -> None:
        """Replaces the IDs; calls all listeners if they changed."""
        ids = tuple(sorted(ids))
        if ids == self.ids:
            return
        self.ids = ids
        for listener in tuple(self._listeners):
            listener(ids)

    def listen(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `listener` with all IDs, now and on every change."""
        self._listeners.append(listener)
        listener(self.ids)

    def remove_listener(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Removes a listener. Raises ValueError if it is not registered."""
        self._listeners.remove(listener)


WORKERS: Final[defaultdict[str, WorkerSet]] = defaultdict(WorkerSet)
"""Worker sets of this process by name of the deployment, updated by Serve's routers
(`cluster.pinning`) and observed by transports."""
