"""An in-memory store of the settings that gateways share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Store:
    """An in-memory settings store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self.num_reads = 0

    async def read(self) -> dict[str, bytes]:
        self.num_reads += 1
        if self.failure is not None:
            raise self.failure
        return dict(self.values)

    async def write(self, values: Mapping[str, bytes]) -> None:
        if self.failure is not None:
            raise self.failure
        self.values.update(values)

    async def delete(self, names: Sequence[str]) -> None:
        if self.failure is not None:
            raise self.failure
        for name in names:
            self.values.pop(name, None)
