"""A correction of uvicorn, which Serve starts in gateways with nothing to choose but its times."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def release_reset_connections() -> None:
    """Lets go of a connection that its client has reset, for the rest of this process.

    uvicorn stops the timer of an idle connection where it is closed, and forgets to where it is
    reset, as proxies do with those that they have too many of: each then stays, 8 KiB of it, until
    its keep-alive time is over.
    """
    if getattr(HttpToolsProtocol.connection_lost, "releases", False):
        return
    lose = HttpToolsProtocol.connection_lost

    def connection_lost(self: Any, exc: Exception | None) -> None:
        lose(self, exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    vars(connection_lost)["releases"] = True
    HttpToolsProtocol.connection_lost = connection_lost  # type: ignore[method-assign]
