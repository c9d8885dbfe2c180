"""Entry point of `python -m deploy.benchmarks`."""

from __future__ import annotations

import sys

from deploy.benchmarks.cli import main

sys.exit(main())
