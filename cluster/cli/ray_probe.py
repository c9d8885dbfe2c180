"""`python -m cluster.cli.ray_probe ADDRESS`: prints a Ray cluster's versions as one JSON object.

It is a separate process because Ray exits the process if its token is rejected, has a long timeout
for unreachable addresses, and reads the token's environment variables only once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from cluster.environment import ray_settings

CONNECT_TIMEOUT_S = 3


def main(address: str) -> dict[str, Any]:
    """Versions of `ray` and `python` on the cluster, or an error message as `problem`.

    Args:
        address: HOST:PORT of the cluster's GCS; `auto` for RAY_ADDRESS, or this machine's cluster.
    """
    for name, value in ray_settings().items():
        os.environ.setdefault(name, value)
    from ray._common.usage.usage_lib import get_cluster_metadata
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    try:
        found = canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError) as error:
        return {"problem": str(error)}
    if found is None:
        return {"problem": "no Ray cluster is running on this machine, and RAY_ADDRESS is not set"}
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return {"problem": f"cannot connect to {found} ({error.strerror or error})"}
    metadata = get_cluster_metadata(GcsClient(address=found))
    return {"ray": metadata["ray_version"], "python": metadata["python_version"]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
