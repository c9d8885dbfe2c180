"""`make check-chaos`: processes are killed and stopped under load, and no request is lost.

A fleet on CPU answers a fixed list of requests, whose right answers were taken before, while one
process after the other is killed or stopped, connections are cut and memory gets short. With
--cancels thousands of clients leave instead, at whatever moment (`make check-cancels`); with --soak
there is steady load, a little of it hostile (`make check-soak`).
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
    """Faults, clients that leave, or a soak."""
    run = run_cancels if options.cancels else run_soak if options.soak_s else run_faults
    # Ray tells the standard output of processes that have died, where results go.
    with redirect_stdout(sys.stderr):
        return run(options)


if __name__ == "__main__":
    sys.exit(check_main(run_chaos, ChaosOptions))
