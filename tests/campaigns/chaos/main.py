"""`make check-chaos`: processes are killed and stopped under load; no request may be lost.

A fleet on CPU serves a fixed list of requests with known answers while faults are injected:
processes are killed or stopped in sequence, connections are closed, and memory becomes scarce. With
--cancels, thousands of clients disconnect at random moments instead (`make check-cancels`). With
--soak, the fleet serves an hour of steady load, some of it invalid (`make check-soak`).
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from cluster.bench.report import Result
from tests.campaigns.chaos.campaign import run_faults
from tests.campaigns.chaos.cancels import run_cancels
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.soak import run_soak
from tests.campaigns.checks import check_main


def run_chaos(options: ChaosOptions) -> Result:
    """Runs faults, disconnecting clients, or a soak test."""
    run = run_cancels if options.cancels else run_soak if options.soak_s else run_faults
    # Ray prints messages about dead processes to standard output, which is reserved for results.
    with redirect_stdout(sys.stderr):
        return run(options)


if __name__ == "__main__":
    sys.exit(check_main(run_chaos, ChaosOptions))
