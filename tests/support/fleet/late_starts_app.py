"""Serve applications whose replicas cannot start immediately, on their own Ray cluster.

The argument is a JSON object with the port, the `args` of a Serve config by application, and an
open file descriptor. Until standard input ends, a JSON line with the applications' state is written
to the file every 0.25 s. Standard output is not used, because Ray prints to it in the middle of
lines.
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback

from cluster.directories import DIRECTORY_VARIABLE
from cluster.environment import prepare
from cluster.local_ray import init_local_ray

PERIOD_S = 0.25


def main() -> None:
    """Runs the applications."""
    options = json.loads(sys.argv[1])
    environment = prepare(host="127.0.0.1", port=options["port"], haproxy=False)
    try:
        init_local_ray(environment.directory, num_cpus=8)
        from ray import serve
        from ray.serve.config import HTTPOptions

        from cluster.app import build_app

        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=options["port"]))
        targets = [
            serve.RunTarget(
                build_app(args), name=name, route_prefix="/" if name == "rayfleet" else f"/{name}"
            )
            for name, args in options["applications"].items()
        ]
        serve.run_many(
            targets,
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        with open(options["report"], "w") as report:
            while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
                print(json.dumps(state()), file=report, flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        environment.close()


def state() -> dict[str, object]:
    """State of the applications, and what their replicas wait for."""
    from ray import serve

    waiting = []
    try:
        from cluster.starting import read

        waiting = [[w.name, w.delay.attempts, w.delay.reason] for w in read()]
    except ImportError:  # not in this version
        pass
    applications = {}
    for name, application in serve.status().applications.items():
        messages = [deployment.message for deployment in application.deployments.values()]
        applications[name] = [application.status, "\n".join([application.message, *messages])]
    import ray

    settings = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    return {
        "applications": applications,
        "waiting": waiting,
        "directory": os.environ[DIRECTORY_VARIABLE],
        "settings": {**settings, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    }


if __name__ == "__main__":
    main()
