"""Command-line parser with two-line errors that suggest the intended flag."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cluster.cli.options import ObjectOption
from cluster.config import REMOVED, RENAMED, UNSUPPORTED

SIMILARITY = 0.6
"""Minimum difflib ratio for a flag to be suggested; difflib's default."""
MAX_SUGGESTED = 3
"""Maximum number of flags suggested for a common prefix."""
WIDTH = 1000
"""Width of an error's usage line in columns, large enough to avoid line breaks."""
ARGPARSE_GROUPS = ("positional arguments", "options")
"""Titles of argparse's default groups of arguments."""
HELP_ON = "--help="
"""Prefix of the flag for help on all options, or on one group."""


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser with shorter errors and help; also the class of its subcommands' parsers.

    Flags cannot be abbreviated: a typo such as --num-worker is an error that suggests the flag.
    Unknown flags are reported by the subcommand. In argparse, the outermost parser reports them,
    with the usage of all commands.
    """

    def __init__(
        self, *args: Any, fill: Callable[[CommandParser], None] | None = None, **kwargs: Any
    ) -> None:
        """Creates a parser. `fill`, if given, adds the arguments only when the command is run,
        because it imports the command's modules."""
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self._fill = fill
        self.common: frozenset[str] = frozenset()
        """Flags listed by plain `--help`; empty for all."""
        self.explain: Callable[[str], str] = lambda word: ""
        """Function that returns a suggestion for an unknown argument; an empty string if there is
        none."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses arguments; exits with an error for unknown ones."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        if self.common:
            for word in args or ():
                if word.startswith(HELP_ON):
                    print(self.help_on(word.removeprefix(HELP_ON)), end="")
                    self.exit()
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._describe(unknown))
        return namespace, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Returns no flags, since flags cannot be abbreviated.

        Even without `allow_abbrev`, which only applies to flags with two dashes, argparse would
        accept -t for -tp.
        """
        return []

    def format_help(self) -> str:
        """Text of `--help`."""
        return self.help_on("") if self.common else super().format_help()

    def help_on(self, topic: str) -> str:
        """Text of `--help=TOPIC`; exits with status 2 for an unknown topic.

        Args:
            topic: `all`, the title of a group of options, or empty for the flags in `common`.
        """
        groups = [g for g in self._action_groups if g._group_actions]
        titles = [g.title or "" for g in groups]
        topics = ["all", *(title for title in titles if title not in ARGPARSE_GROUPS)]
        if topic and topic not in topics:
            self.error(f"--help={topic}: choose from {', '.join(topics)}")
        formatter = self._get_formatter()
        formatter.add_usage(self._usage(), [], [])
        formatter.add_text(self.description)
        for group, title in zip(groups, titles, strict=True):
            if topic in ("", "all", title):
                formatter.start_section(title)
                formatter.add_arguments(a for a in group._group_actions if topic or self._in(a))
                formatter.end_section()
        formatter.add_text(self.epilog)
        if not topic:
            number = sum(1 for group in groups for _ in group._group_actions) - 1
            formatter.add_text(
                f"These are the most common of {number} options. Use --help=all to list all, or "
                f"--help=GROUP for one group: {', '.join(topics[1:])}."
            )
        return formatter.format_help()

    def _in(self, action: argparse.Action) -> bool:
        """Whether plain `--help` lists an argument."""
        return not action.option_strings or not self.common.isdisjoint(action.option_strings)

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, each on one line, and exits with status 2."""
        hint = f"(`{self.prog} --help` lists the flags)"
        self.exit(2, f"usage: {self._usage()}   {hint}\n{self.prog}: {message}\n")

    def _usage(self) -> str:
        """Usage line with the command and its positional arguments."""
        formatter = argparse.HelpFormatter(prog=f"{self.prog} [FLAGS]", width=WIDTH)
        formatter.add_usage(None, [a for a in self._actions if not a.option_strings], [])
        return formatter.format_help().strip().removeprefix("usage: ")

    def _describe(self, unknown: list[str]) -> str:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            instead = self.explain(unknown[0])
            return f"unexpected argument: {' '.join(unknown)}{instead and f' ({instead})'}"
        known = [flag for action in self._actions for flag in action.option_strings]
        descriptions = []
        for flag in flags:
            if (hint := self._hint_for(flag)) is not None:
                descriptions.append(f"{flag} ({hint})")
                continue
            word = flag.replace("_", "-")
            similar = [name for name in known if name.startswith(word)][:MAX_SUGGESTED]
            similar = similar or difflib.get_close_matches(word, known, 1, SIMILARITY)
            hint = f"did you mean {' or '.join(similar)}?" if similar else self.explain(flag)
            descriptions.append(f"{flag} ({hint})" if hint else flag)
        return f"unknown flag {', '.join(descriptions)}"

    def _hint_for(self, flag: str) -> str | None:
        """Replacement of a flag that was renamed or moved into a JSON object, or the reason why it
        is unsupported; None for other flags."""
        old = flag.lstrip("-").removeprefix("no-").replace("-", "_")
        if old in REMOVED or old in UNSUPPORTED:
            return REMOVED.get(old) or UNSUPPORTED[old]
        name = RENAMED.get(old, old)
        for action in self._actions:
            if isinstance(action.type, ObjectOption) and name in action.type.hints:
                return f"now in {action.option_strings[0]} '{{\"{name}\": ...}}'"
        return None if name == old else f"now --{name.replace('_', '-')}"
