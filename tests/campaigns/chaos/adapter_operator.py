"""Operator: changes the LoRA adapters of a fleet at random, and records the changes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import httpx

from tests.campaigns.chaos.adapter_history import AdapterHistory, Weights

BASE: Final = "base"
"""Key of the base model's weights."""
STATIC: Final = "configured"
"""Name of the adapter in the configuration; its weights are those of the first folder."""
KINDS_OF_CHANGE: Final = ("load", "replace", "unload")
ADMIN_KEY: Final = "operator"
_HEADERS: Final = {"authorization": f"Bearer {ADMIN_KEY}"}
_PERIOD_S: Final = 1.0
"""Seconds between changes."""
_TIMEOUT_S: Final = 60.0
_RETRY_S: Final = 0.25
_TRY_AGAIN_S: Final = 120.0
"""Seconds for which a change is retried."""
_NOT_NOW: Final = (429, 502, 503, 504)
_SHARE_UNLOADED: Final = 0.2
"""Fraction of the changes that unload an adapter."""


class Operator:
    """Changes adapters of a fleet with the admin key, and records the changes. Retries while no
    gateway or worker is available. A context manager, which stops the changes in the end.

    Args:
        base_url: URL of the endpoint.
        folders: folders of adapters by key of their weights.
        history: record of the changes.
        seed: seed of the random changes.
    """

    def __init__(
        self, base_url: str, folders: Mapping[str, Path], history: AdapterHistory, seed: int
    ) -> None:
        self.base_url = base_url
        self.keys = list(folders)
        """Keys of the weights."""
        self.changes: Counter[str] = Counter()
        """Confirmed changes by kind."""
        self.retries: Counter[str] = Counter()
        self.problems: list[str] = []
        """Changes that failed, and why."""
        self.slowest_s = 0.0
        """Maximum seconds of a change, including retries."""
        self._folders = folders
        self._history = history
        self._chance = random.Random(seed)
        self._client = httpx.Client(
            base_url=base_url,
            headers=_HEADERS,
            timeout=_TIMEOUT_S,
            limits=httpx.Limits(max_keepalive_connections=0),  # any gateway may get each request
            trust_env=False,
        )
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._client.close()

    def start(self, names: Sequence[str]) -> None:
        """Changes these adapters at random, one at a time, until `stop`."""
        self._thread = threading.Thread(target=self._live, args=(names,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Makes no more changes; returns after the last one."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def change(self, name: str, weights: Weights) -> None:
        """Loads, replaces or unloads an adapter."""
        before = self._history.current(name)
        kind = "unload" if weights is None else "load" if before is None else "replace"
        body: dict[str, object] = {"lora_name": name}
        if weights is not None:
            body |= {"lora_path": str(self._folders[weights]), "load_inplace": before is not None}
        began = time.monotonic()
        self._history.begin(name, weights, began)
        action = "unload" if weights is None else "load"
        problem = self._post(f"/v1/{action}_lora_adapter", body)
        if problem is not None:
            self.problems.append(f"{kind} {name}: {problem}")
            return
        self._history.confirm(name, time.monotonic())
        self.changes[kind] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def differing(self, names: Sequence[str], num_looks: int) -> list[str]:
        """Lists of adapters that differ from this operator's record, out of `num_looks` lists, each
        requested over a new connection."""
        folders = {name: self._history.current(name) for name in (STATIC, *names)}
        expected = {
            name: str(self._folders[weights])
            for name, weights in folders.items()
            if weights is not None
        }
        found = []
        for _ in range(num_looks):
            rows = self._client.get("/admin/lora_adapters").json()["data"]
            listed = {row["lora_name"]: row["lora_path"] for row in rows}
            if listed != expected:
                found.append(f"{listed} instead of {expected}")
        return found

    def _live(self, names: Sequence[str]) -> None:
        while not self._stopping.wait(_PERIOD_S):
            self.change(*self.next_change(names))

    def next_change(self, names: Sequence[str]) -> tuple[str, Weights]:
        """A random change; at least half of the names stay loaded."""
        current = {name: self._history.current(name) for name in names}
        missing = [name for name in names if current[name] is None]
        loaded = [name for name in names if current[name] is not None]
        if loaded and len(missing) < len(names) // 2 and self._chance.random() < _SHARE_UNLOADED:
            return self._chance.choice(loaded), None
        name = self._chance.choice(missing if missing and self._chance.random() < 0.5 else names)
        others = [weights for weights in self._folders if weights != current[name]]
        return name, self._chance.choice(others)

    def _post(self, path: str, body: Mapping[str, object]) -> str | None:
        """Sends a request until it is answered; returns what went wrong."""
        deadline = time.monotonic() + _TRY_AGAIN_S
        is_repeated = False
        while True:
            try:
                response = self._client.post(path, json=body)
                problem = f"HTTP {response.status_code}: {response.text}"
                if response.status_code == httpx.codes.OK:
                    return None
                # An attempt without an answer may have unloaded it.
                if is_repeated and response.status_code == httpx.codes.NOT_FOUND:
                    return None
                if response.status_code not in _NOT_NOW:
                    return problem
                self.retries[f"HTTP {response.status_code}"] += 1
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                self.retries[type(error).__name__] += 1
            if time.monotonic() > deadline:
                return problem
            is_repeated = True
            time.sleep(_RETRY_S)
