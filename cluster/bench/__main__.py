"""`python -m cluster.bench serve ...`: runs benchmarks without the other `rayfleet` commands."""

from __future__ import annotations

import sys

from cluster.bench.cli import main

sys.exit(main())
