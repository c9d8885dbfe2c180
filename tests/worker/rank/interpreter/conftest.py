"""Triton reads TRITON_INTERPRET when it is imported: these tests need a process of their own."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
