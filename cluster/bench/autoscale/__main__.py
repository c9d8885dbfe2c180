"""The command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import cluster.bench.autoscale
from cluster.bench.autoscale.options import AutoscaleOptions
from cluster.bench.autoscale.run import run_autoscale
from cluster.bench.report import emit
from cluster.cli.options import add_options, given_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; 1 if a check does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.bench.autoscale", description=cluster.bench.autoscale.__doc__
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, AutoscaleOptions)
    args = parser.parse_args(arguments)
    try:
        options = AutoscaleOptions(**given_options(args, AutoscaleOptions))
    except ValueError as error:
        parser.error(str(error))
    result = run_autoscale(options)
    emit(result, as_json=args.json, title="autoscaling")
    return 0 if all(check["holds"] for check in result["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
