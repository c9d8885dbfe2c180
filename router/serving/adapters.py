"""AdapterRegistry: the LoRA adapters of a model by name, shared by all gateways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from router.errors import ApiError, bad_request
from router.peers import Peers
from router.serving.settings import SettingsStore, SharedSettings
from worker.protocol.adapters import AdapterCheck, AdapterRef
from worker.protocol.analyzed import analyzed

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S = 2.0
"""Timeout in seconds of a call to another gateway, which reads the store before it replies."""
MAX_ADAPTERS = 4096
"""Maximum number of adapters loaded at run time; each takes about a kilobyte in every gateway."""
_NAME = re.compile(r"[A-Za-z0-9][\w./:@+-]{0,127}", re.ASCII)

CheckFolder = Callable[[str], Coroutine[Any, Any, AdapterCheck]]
"""Makes a worker check an adapter's folder. Raises ConnectionError if the worker is unreachable."""


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that was loaded at run time, as it is kept in the store."""

    folder: str
    version: str
    created: int
    """Unix time in seconds at which the adapter was loaded."""


class AdapterRegistry:
    """Adapters that requests may name: those of the configuration, and those loaded at run time.

    Workers need no registry, since each submit has the adapter's folder and version: workers that
    start later, or whose ranks are rebuilt, read adapters when they are first used. The store is
    authoritative for adapters loaded at run time. After changing the store, a gateway calls the
    other gateways, which read the store again.

    Args:
        model: name of the base model.
        static: names of the configured adapters.
        store: store of the model's gateways; None if this gateway is the only one.
        peers: the other gateways; None if there are none.
    """

    def __init__(
        self,
        model: str,
        static: Iterable[str],
        store: SettingsStore | None,
        peers: Peers | None = None,
    ) -> None:
        self._static: dict[str, AdapterRef | None] = dict.fromkeys(static)
        """Configured adapters by name; the value is None until a worker has reported the adapter's
        version."""
        self._loaded: dict[str, LoadedAdapter] = {}
        self._shared = SharedSettings(store, "LoRA adapters", self._apply)
        self._peers = peers
        self._method = f"adapters/{model}"
        self.is_complete = store is None
        """Whether the store has been read: until then, any name may be that of an adapter."""
        if peers is not None:
            peers.handle_call(self._method, self._on_call)
            # A gateway that changes the store only calls those that it knows. One that has just
            # started missed the changes between its first read and this event.
            peers.on_change(self._shared.read_soon)

    @property
    def names(self) -> Sequence[str]:
        """Names of all adapters."""
        return [*self._static, *self._loaded]

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """Adapters loaded at run time, by name."""
        return self._loaded

    @property
    def configured(self) -> Mapping[str, AdapterRef | None]:
        """Configured adapters by name; the value is None until a worker has reported the adapter's
        version."""
        return self._static

    @property
    def versions(self) -> dict[str, str]:
        """Versions by name of all adapters whose version is known."""
        refs = (self.find(name) for name in self.names)
        return {ref.name: ref.version for ref in refs if ref is not None}

    def __contains__(self, name: object) -> bool:
        return name in self._static or name in self._loaded

    def find(self, name: str) -> AdapterRef | None:
        """The current version of an adapter; None if the adapter is unknown, or if it is configured
        but no worker has reported its version yet."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return AdapterRef(name, loaded.folder, loaded.version)
        return self._static.get(name)

    def reported(self, adapters: Iterable[AdapterRef]) -> None:
        """Records the configured adapters of a worker that has attached."""
        for ref in adapters:
            if ref.name in self._static:
                self._static[ref.name] = ref

    async def load(
        self, name: str, folder: str, checks: Sequence[CheckFolder], *, replace: bool
    ) -> None:
        """Registers an adapter after all workers have checked its folder.

        Args:
            name: name of the adapter in requests.
            folder: folder of the adapter on the workers' nodes.
            checks: check of each attached worker.
            replace: whether another adapter of this name may be replaced.

        Raises:
            ApiError: 400 if the name is taken or invalid, or a worker rejects the folder; 503 if no
                worker could check it, or it could not be stored.
        """
        if not _NAME.fullmatch(name):
            raise bad_request(
                f"{name!r} is not a valid name: use up to 128 letters, digits and ./:@+_-",
                "lora_name",
            )
        if name in self._static:
            raise bad_request(f"{name} is configured by --lora-modules: use another lora_name")
        if name not in self._loaded and len(self._loaded) >= MAX_ADAPTERS:
            raise bad_request(f"the maximum of {MAX_ADAPTERS} adapters is loaded: unload one first")
        version = await _checked_version(folder, checks)
        async with self._shared.lock:
            await self._shared.refresh()
            known = self._loaded.get(name)
            if known is not None and (known.folder, known.version) == (folder, version):
                return
            if known is not None and not replace:
                raise bad_request(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True."
                )
            loaded = LoadedAdapter(folder, version, int(time.time()))
            if (store := self._shared.store) is not None:
                encoded = {quote(name, safe=""): msgspec.msgpack.encode(loaded)}
                await self._shared.changed(store.write(encoded))
            self._loaded[name] = loaded
        logger.info("loaded LoRA adapter %s, version %s", name, version)
        await self._call_others()

    async def unload(self, name: str) -> None:
        """Removes an adapter; its running requests continue.

        Raises:
            ApiError: 404 if it is not loaded; 400 if it is configured; 503 if the change could not
                be stored.
        """
        if name in self._static:
            raise bad_request(f"{name} is configured by --lora-modules: remove it there")
        async with self._shared.lock:
            await self._shared.refresh()
            if name not in self._loaded:
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
            if (store := self._shared.store) is not None:
                await self._shared.changed(store.delete([quote(name, safe="")]))
            del self._loaded[name]
        logger.info("unloaded LoRA adapter %s", name)
        await self._call_others()

    async def start(self) -> None:
        """Reads the store, and applies other gateways' changes until `close`."""
        await self._shared.start()

    async def close(self) -> None:
        """Stops applying other gateways' changes."""
        await self._shared.close()

    async def _on_call(self, _: bytes) -> bytes:
        """Reads the store again after another gateway has changed it."""
        await self._shared.read()
        return b""

    async def _call_others(self) -> None:
        """Makes the other gateways read the store; one that does not respond reads it later."""
        peers = self._peers
        if peers is None or not peers.has_others:
            return

        async def call(peer_id: str) -> None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(PEER_TIMEOUT_S):
                    await peers.call(peer_id, self._method, b"")

        await asyncio.gather(*map(call, peers.ids - {peers.own_id}))

    def _apply(self, values: dict[str, bytes]) -> None:
        found = {}
        for name, value in values.items():
            # Values stored by another release may be unknown to this one.
            with contextlib.suppress(msgspec.MsgspecError):
                decoded = msgspec.msgpack.decode(value, type=analyzed(LoadedAdapter))
                found[unquote(name)] = decoded
        self._loaded = {name: found[name] for name in sorted(found)}
        self.is_complete = True


async def _checked_version(folder: str, checks: Sequence[CheckFolder]) -> str:
    """Version of an adapter's folder, which must be the same on all reachable workers."""
    results = await asyncio.gather(*(check(folder) for check in checks), return_exceptions=True)
    versions: dict[str, None] = {}
    for result in results:
        if isinstance(result, AdapterCheck):
            if result.problem:
                raise bad_request(result.problem, "lora_path")
            if result.version:
                versions[result.version] = None
        elif not isinstance(result, (ConnectionError, TimeoutError)):
            raise result
    if not versions:
        raise ApiError(503, "no worker could check the adapter: try again", retry_after_s=1)
    if len(versions) > 1:
        raise bad_request(
            f"{folder} differs between the workers' nodes: copy the same files to all of them",
            "lora_path",
        )
    return next(iter(versions))
