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
from router.serving.admission import TIMEOUT_S, SettingsStore
from worker.protocol.adapters import AdapterCheck, AdapterRef
from worker.protocol.analyzed import analyzed

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds between reads of the store: the maximum delay until a gateway that missed a call applies
another gateway's change."""
PEER_TIMEOUT_S = 2.0
"""Timeout in seconds of a call to another gateway, which then reads the store."""
MAX_ADAPTERS = 4096
"""Maximum number of adapters loaded at run time; each takes about a kilobyte in every gateway."""
_NAME = re.compile(r"[A-Za-z0-9][\w./:@+-]{0,127}", re.ASCII)

CheckFolder = Callable[[str], Coroutine[Any, Any, AdapterCheck]]
"""Checks a folder on a worker. Raises ConnectionError if it is unreachable."""


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that was loaded at run time, as stored."""

    folder: str
    version: str
    created: int
    """Unix time in seconds at which it was loaded."""


class AdapterRegistry:
    """Adapters that requests may name: those of the configuration, and those loaded at run time.

    Workers need no registry, since each submit has the adapter's folder and version: workers that
    start later, or whose ranks are rebuilt, read adapters when they are first used. The store is
    authoritative for adapters loaded at run time. A gateway that changes it calls the others, which
    read it again.

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
        """Configured adapters by name; None until a worker has reported its version."""
        self._loaded: dict[str, LoadedAdapter] = {}
        self._store = store
        self._peers = peers
        self._method = f"adapters/{model}"
        self._lock = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._reachable = True
        self.is_complete = store is None
        """Whether the store has been read: until then, any name may be that of an adapter."""
        if peers is not None:
            peers.handle_call(self._method, self._on_call)

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
        """Adapters of the configuration, by name; None until a worker has reported its version."""
        return self._static

    def __contains__(self, name: object) -> bool:
        return name in self._static or name in self._loaded

    def find(self, name: str) -> AdapterRef | None:
        """The current version of an adapter; None if it is unknown, or configured and no worker has
        reported its version yet."""
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
            name: its name in requests.
            folder: its folder on the workers' nodes.
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
            raise bad_request(f"{name} is configured by --lora-modules: remove it there")
        if name not in self._loaded and len(self._loaded) >= MAX_ADAPTERS:
            raise bad_request(f"{MAX_ADAPTERS} adapters are loaded: unload one first")
        version = await _checked_version(folder, checks)
        async with self._lock:
            known = self._loaded.get(name)
            if known is not None and (known.folder, known.version) == (folder, version):
                return
            if known is not None and not replace:
                raise bad_request(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True."
                )
            loaded = LoadedAdapter(folder, version, int(time.time()))
            if self._store is not None:
                encoded = {quote(name, safe=""): msgspec.msgpack.encode(loaded)}
                await _stored(self._store.write(encoded))
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
        async with self._lock:
            if name not in self._loaded:
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
            if self._store is not None:
                await _stored(self._store.delete([quote(name, safe="")]))
            del self._loaded[name]
        logger.info("unloaded LoRA adapter %s", name)
        await self._call_others()

    async def start(self) -> None:
        """Reads the store, and applies changes of other gateways until `close`."""
        if self._store is not None:
            await self._read(self._store)
            self._follower = asyncio.create_task(self._follow(self._store))

    async def close(self) -> None:
        """Stops applying changes of other gateways."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower

    async def _follow(self, store: SettingsStore) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._read(store)

    async def _on_call(self, _: bytes) -> bytes:
        """Another gateway has changed the store."""
        if self._store is not None:
            await self._read(self._store)
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

    async def _read(self, store: SettingsStore) -> None:
        async with self._lock:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    values = await store.read()
            except Exception as error:
                if self._reachable:  # logged once, not with each read
                    logger.warning("failed to read LoRA adapters, keeping known ones: %r", error)
                self._reachable = False
                return
            self._reachable = self.is_complete = True
            found = {}
            for name, value in values.items():
                # Values stored by another release may be unknown to this one.
                with contextlib.suppress(msgspec.MsgspecError):
                    decoded = msgspec.msgpack.decode(value, type=analyzed(LoadedAdapter))
                    found[unquote(name)] = decoded
            self._loaded = {name: found[name] for name in sorted(found)}


async def _checked_version(folder: str, checks: Sequence[CheckFolder]) -> str:
    """Version of a folder, which must be the same on all workers that can be reached."""
    results = await asyncio.gather(*(check(folder) for check in checks), return_exceptions=True)
    versions: dict[str, None] = {}
    for result in results:
        if isinstance(result, AdapterCheck):
            if result.problem:
                raise bad_request(result.problem, "lora_path")
            versions[result.version] = None
        elif not isinstance(result, (ConnectionError, TimeoutError)):
            raise result
    if not versions:
        raise ApiError(503, "no worker could check the adapter: try again", retry_after_s=1)
    if len(versions) > 1:
        raise bad_request(f"{folder} has different contents on the workers' nodes", "lora_path")
    return next(iter(versions))


async def _stored(change: Coroutine[Any, Any, None]) -> None:
    """Waits for a change of the store. Raises ApiError (503) if it may not have been made."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await change
    except Exception as error:
        problem = f"adapters unchanged, storing the change failed: {error!r}"
        raise ApiError(503, problem, retry_after_s=1) from error
