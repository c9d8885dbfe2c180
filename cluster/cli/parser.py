"""The command line's parser: a mistake is told in two lines, with what was probably meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cluster.cli.options import ObjectOption
from cluster.config import REMOVED, RENAMED

SIMILARITY = 0.6
"""Ratio of difflib from which another flag is worth naming; its own default."""
WIDTH = 1000
"""Columns of the line about the usage, which is not broken."""


class CommandParser(argparse.ArgumentParser):
    """argparse's, but for what it says of mistakes. Parsers of subcommands become of this class.

    A flag that a subcommand does not know is told by that subcommand: argparse hands it on to the
    outermost parser, which shows the usage of all.
    """

    def __init__(
        self, *args: Any, fill: Callable[[CommandParser], None] | None = None, **kwargs: Any
    ) -> None:
        """`fill` adds the arguments, when this command is asked for: imports take their time."""
        super().__init__(*args, **kwargs)
        self._fill = fill

    def parse_known_args(  # type: ignore[override]  # argparse overloads it for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses as argparse does, but leaves nothing unknown."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._describe(unknown))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Ends with 2, after a line about the usage and one about the mistake."""
        formatter = argparse.HelpFormatter(prog=f"{self.prog} [FLAGS]", width=WIDTH)
        formatter.add_usage(None, [a for a in self._actions if not a.option_strings], [])
        usage = formatter.format_help().strip()
        self.exit(2, f"{usage}   (`{self.prog} --help` tells the flags)\n{self.prog}: {message}\n")

    def _describe(self, unknown: list[str]) -> str:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            return f"unexpected: {' '.join(unknown)}"
        known = [flag for action in self._actions for flag in action.option_strings]
        descriptions = []
        for flag in flags:
            if (news := self._news_of(flag)) is not None:
                descriptions.append(f"{flag} ({news})")
                continue
            meant = difflib.get_close_matches(flag.replace("_", "-"), known, 1, SIMILARITY)
            descriptions.append(f"{flag} (did you mean {meant[0]}?)" if meant else flag)
        return f"unknown flag {', '.join(descriptions)}"

    def _news_of(self, flag: str) -> str | None:
        """What became of a flag that there was; None for one that there never was."""
        old = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if old in REMOVED:
            return REMOVED[old]
        name = RENAMED.get(old, old)
        for action in self._actions:
            if isinstance(action.type, ObjectOption) and name in action.type.hints:
                return f"it is now in {action.option_strings[0]} '{{\"{name}\": ...}}'"
        return None if name == old else f"it is now --{name.replace('_', '-')}"
