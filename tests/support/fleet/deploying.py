"""Deploys what standard input describes on a fleet's Ray cluster, whose address is the argument.

In a process of its own, whose environment is that of the fleet.
"""

from __future__ import annotations

import json
import sys

from cluster.config import serve_config_from_mapping
from cluster.launch import LocalFleet
from cluster.local_ray import join_ray


def main(address: str) -> None:
    """Returns when what was deployed serves."""
    config = serve_config_from_mapping(json.load(sys.stdin))
    join_ray(address)
    LocalFleet(config, address=address).update(config)


if __name__ == "__main__":
    main(sys.argv[1])
