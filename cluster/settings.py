"""Settings shared by gateways, in the key-value store of the Ray cluster's GCS.

Ray Serve stores checkpoints of its deployments there as well, so settings survive a restart of the
head if the checkpoints do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

NAMESPACE = "rayfleet"


class RaySettings:
    """A SettingsStore of one model.

    Args:
        application: name of the Serve application, which has separate settings.
        model: name of the model.
        kind: kind of the settings; empty for admission rules.
    """

    def __init__(self, application: str, model: str, kind: str = "") -> None:
        prefix = f"{application}/{model}/"
        self._prefix = (f"{kind}:{prefix}" if kind else prefix).encode()

    async def read(self) -> dict[str, bytes]:
        """All values by name. Raises Exception if the GCS is not reachable."""
        return await asyncio.to_thread(self._read)

    async def write(self, values: Mapping[str, bytes]) -> None:
        """Adds or replaces values. Raises Exception if the GCS is not reachable."""
        await asyncio.to_thread(self._write, dict(values))

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes values. Raises Exception if the GCS is not reachable."""
        await asyncio.to_thread(self._delete, list(names))

    def _read(self) -> dict[str, bytes]:
        from ray.experimental import internal_kv

        keys = internal_kv._internal_kv_list(self._prefix, namespace=NAMESPACE)
        # One call: thousands of adapters, each with a call of its own, would take seconds.
        client = internal_kv.internal_kv_get_gcs_client()
        values = client.internal_kv_multi_get(keys, namespace=NAMESPACE.encode())
        names = {key[len(self._prefix) :].decode(): value for key, value in values.items()}
        # With a slash it is a setting of another model, whose name starts with this one's.
        return {name: value for name, value in names.items() if "/" not in name}

    def _write(self, values: Mapping[str, bytes]) -> None:
        from ray.experimental import internal_kv

        for name, value in values.items():
            key = self._prefix + name.encode()
            internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)

    def _delete(self, names: Sequence[str]) -> None:
        from ray.experimental import internal_kv

        for name in names:
            internal_kv._internal_kv_del(self._prefix + name.encode(), namespace=NAMESPACE)
