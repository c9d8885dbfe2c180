"""`make check-chaos`: processes are killed and stopped under load; no request may be lost.

A fleet on CPU serves a fixed list of requests with known answers while faults are injected:
processes are killed or stopped one after another, connections are closed, and memory becomes
scarce. With --adapters, LoRA adapters are loaded, replaced and unloaded meanwhile (`make
check-adapters`). With --cancels, thousands of clients disconnect at random moments instead (`make
check-cancels`); with --soak, there is an hour of steady load, some of it invalid (`make
check-soak`).
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from cluster.bench.report import Result
from tests.campaigns.chaos.adapters import run_adapters
from tests.campaigns.chaos.campaign import run_faults
from tests.campaigns.chaos.cancels import run_cancels
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.soak import run_soak
from tests.campaigns.checks import check_main


def run_chaos(options: ChaosOptions) -> Result:
    """Runs faults, changes of adapters, disconnecting clients, or a soak test."""
    run = run_cancels if options.cancels else run_soak if options.soak_s else run_faults
    if options.adapters:
        run = run_adapters
    # Ray prints messages about processes that have died to standard output, which is for results.
    with redirect_stdout(sys.stderr):
        return run(options)


if __name__ == "__main__":
    sys.exit(check_main(run_chaos, ChaosOptions))
