"""Triton reads TRITON_INTERPRET at import: these tests need a separate process."""

from __future__ import annotations

from tests.support.interpreter import IS_INTERPRETED, hasten_interpreter

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]

if IS_INTERPRETED:
    hasten_interpreter()
