"""`rayfleet keys`: generates and checks API keys."""

from __future__ import annotations

import argparse
import secrets
import sys
from datetime import UTC, datetime

from router.keys import KeyFile, digest_of
from router.keys.entry import PREFIX, named

KEY_BYTES = 32
"""Number of random bytes in a new key: enough that the key cannot be recovered from its digest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet keys` to its parser."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    new = actions.add_parser("new", help="generate an API key and its entry for --api-key-file")
    new.add_argument("name", help="name of the key, shown in metrics and the audit log")
    new.add_argument(
        "--monitoring",
        action="store_true",
        help="allow the key to read the metrics of all keys and models, and agent sessions",
    )
    new.set_defaults(run=run_new)
    check = actions.add_parser("check", help="validate an --api-key-file")
    check.add_argument("path", help="file, or folder of files")
    check.set_defaults(run=run_check)


def run_new(arguments: argparse.Namespace) -> int:
    """Prints a new key to stderr, and its entry for --api-key-file, which has only the key's
    digest, to stdout; returns the exit code."""
    key = f"rf-{secrets.token_urlsafe(KEY_BYTES)}"
    table = {"key": PREFIX + digest_of(key.encode()).hex()}
    named(arguments.name, table)
    print(
        f"API key for {arguments.name} (save it now, it is not stored anywhere): {key}",
        file=sys.stderr,
    )
    print(f'[{_quoted(arguments.name)}]\nkey = "{table["key"]}"')
    if arguments.monitoring:
        print("monitoring = true")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Prints the limits of each key in a file, or in a folder of files; returns the exit code."""
    for entry in KeyFile(arguments.path).entries():
        limits = {
            "requests per minute": entry.requests_per_minute,
            "tokens per minute": entry.tokens_per_minute,
            "concurrent requests": entry.max_concurrent_requests,
        }
        properties = [f"{limit:.0f} {name}" for name, limit in limits.items() if limit]
        properties.append(f"priority up to {entry.max_priority}")
        properties += [] if entry.slo else ["no SLO"]
        properties += [f"models {', '.join(sorted(entry.models))}"] if entry.models else []
        properties += ["monitoring"] if entry.monitoring else []
        if entry.expires < float("inf"):
            until = datetime.fromtimestamp(entry.expires, UTC)
            properties.append(f"until {until:%Y-%m-%d %H:%M} UTC")
        print(f"{entry.name}: {'; '.join(properties)}")
    return 0


def _quoted(name: str) -> str:
    return f'"{name}"' if "." in name else name
