"""`rayfleet keys`: makes and checks API keys."""

from __future__ import annotations

import argparse
import secrets
import sys
from datetime import UTC, datetime

from router.keys import KeyFile, digest_of
from router.keys.entry import PREFIX, named

KEY_BYTES = 32
"""Random bytes of a new key: too many for anyone to find it from its digest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fills the parser of `rayfleet keys`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a new key, and what to put into --api-key-file")
    new.add_argument("name", help="who it is for; metrics and the audit log show it")
    new.add_argument(
        "--monitoring",
        action="store_true",
        help="let the key see the metrics of all keys and models at /metrics, not just its own",
    )
    new.set_defaults(run=run_new)
    check = actions.add_parser("check", help="read an --api-key-file as gateways do")
    check.add_argument("path", help="the file, or folder of files")
    check.set_defaults(run=run_check)


def run_new(arguments: argparse.Namespace) -> int:
    """Prints a new key on stderr and its table for --api-key-file, which has the key's digest
    alone, on stdout; returns the exit code."""
    key = f"rf-{secrets.token_urlsafe(KEY_BYTES)}"
    table = {"key": PREFIX + digest_of(key.encode()).hex()}
    named(arguments.name, table)
    print(f"the key of {arguments.name}, which is kept nowhere: {key}", file=sys.stderr)
    print(f'[{_quoted(arguments.name)}]\nkey = "{table["key"]}"')
    if arguments.monitoring:
        print("monitoring = true")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Prints the limits of each key in a file; returns the exit code."""
    for entry in KeyFile(arguments.path).entries():
        limits = {
            "requests per minute": entry.requests_per_minute,
            "tokens per minute": entry.tokens_per_minute,
            "open at a time": entry.max_concurrent_requests,
        }
        told = [f"{limit:.0f} {what}" for what, limit in limits.items() if limit]
        told.append(f"priority up to {entry.max_priority}")
        told += [] if entry.slo else ["no SLO"]
        told += [f"models {', '.join(sorted(entry.models))}"] if entry.models else []
        told += ["monitoring"] if entry.monitoring else []
        if entry.expires < float("inf"):
            until = datetime.fromtimestamp(entry.expires, UTC)
            told.append(f"until {until:%Y-%m-%d %H:%M} UTC")
        print(f"{entry.name}: {'; '.join(told)}")
    return 0


def _quoted(name: str) -> str:
    return f'"{name}"' if "." in name else name
