"""The worker replicas that this process knows of, by deployment.

Ray Serve pickles a request router's module by value, so the router (`cluster.pinning`) and the
transport (`cluster.transport`) would not share that module's globals: they meet here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final


class WorkerSet:
    """Ids of one deployment's running replicas, and who wants to hear of changes.

    Not thread-safe: everything happens on the replica's one event loop
    (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0).
    """

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()
        self._listeners: list[Callable[[tuple[str, ...]], None]] = []

    def replace(self, ids: tuple[str, ...]) -> None:
        """Takes the new set; listeners are called where it differs from the old one."""
        ids = tuple(sorted(ids))
        if ids == self.ids:
            return
        self.ids = ids
        for listener in tuple(self._listeners):
            listener(ids)

    def listen(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `listener` now and on every change."""
        self._listeners.append(listener)
        listener(self.ids)

    def forget(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Ends what `listen` began."""
        self._listeners.remove(listener)


WORKERS: Final[defaultdict[str, WorkerSet]] = defaultdict(WorkerSet)
"""Workers by name of the deployment: one in a process, which joins Serve's router objects to our
transports."""
