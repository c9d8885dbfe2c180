"""`python -m cluster.bench serve ...`: the benchmarks without the rest of the command line."""

from __future__ import annotations

import sys

from cluster.bench.cli import main

sys.exit(main())
