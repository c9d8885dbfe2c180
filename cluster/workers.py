"""The worker replicas that this process knows of, by deployment.

Ray Serve pickles a request router's module by value, so the router (`cluster.pinning`) and the
transport (`cluster.transport`) would not share that module's globals: they meet here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final


class WorkerSet:
    """Ids of one deployment's running replicas, with listeners to changes.

    Not thread-safe: router and transports run on the gateway's one event loop
    (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0).
    """

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()
        self._listeners: list[Callable[[tuple[str, ...]], None]] = []

    def replace(self, ids: tuple[str, ...]) -> None:
        """Replaces the ids; calls all listeners if that changes them."""
        ids = tuple(sorted(ids))
        if ids == self.ids:
            return
        self.ids = ids
        for listener in tuple(self._listeners):
            listener(ids)

    def listen(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `listener` with all ids, now and on every change."""
        self._listeners.append(listener)
        listener(self.ids)

    def forget(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Removes a listener. Raises ValueError where it does not listen."""
        self._listeners.remove(listener)


WORKERS: Final[defaultdict[str, WorkerSet]] = defaultdict(WorkerSet)
"""Worker sets of this process by name of the deployment: Serve's routers (`cluster.pinning`) change
them, transports listen to them."""
