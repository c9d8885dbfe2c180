"""Deploys a Serve config from standard input on the Ray cluster at the given address.

Runs in a separate process with the fleet's environment.
"""

from __future__ import annotations

import json
import sys

from cluster.config import serve_config_from_mapping
from cluster.launch import LocalFleet
from cluster.local_ray import join_ray


def main(address: str) -> None:
    """Deploys; returns when the application is running."""
    config = serve_config_from_mapping(json.load(sys.stdin))
    join_ray(address)
    LocalFleet(config, address=address).update(config)


if __name__ == "__main__":
    main(sys.argv[1])
