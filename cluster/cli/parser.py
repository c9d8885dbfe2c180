"""Parser of the command line: errors take two lines, and name the flag that was probably meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cluster.cli.options import ObjectOption
from cluster.config import REFUSED, REMOVED, RENAMED

SIMILARITY = 0.6
"""Least ratio of difflib at which another flag is suggested; difflib's own default."""
MOST_SUGGESTED = 3
"""Maximum number of flags that are suggested for a common beginning of their names."""
WIDTH = 1000
"""Columns of the usage line of an error, wide enough to be never broken."""
OWN_GROUPS = ("positional arguments", "options")
"""Titles of argparse's own groups of arguments."""
HELP_ON = "--help="
"""Beginning of a flag that asks for help on all options, or on those of one group."""


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser with shorter errors and help; its subcommands have parsers of this class.

    Flags cannot be abbreviated: a typo such as --num-worker is an error that suggests the flag.
    A subcommand itself reports an unknown flag. In argparse the outermost parser does, with the
    usage of all commands.
    """

    def __init__(
        self, *args: Any, fill: Callable[[CommandParser], None] | None = None, **kwargs: Any
    ) -> None:
        """Creates a parser; `fill` adds its arguments when this command is called, as that imports
        the command's modules."""
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self._fill = fill
        self.common: frozenset[str] = frozenset()
        """Flags that plain `--help` lists; empty for all."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses as argparse does, but exits with an error for an unknown argument."""
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
        """Flags that an unknown word may stand for: none.

        argparse would take -t for -tp even without `allow_abbrev`, which only concerns flags with
        two dashes.
        """
        return []

    def format_help(self) -> str:
        """The text that `--help` prints."""
        return self.help_on("") if self.common else super().format_help()

    def help_on(self, topic: str) -> str:
        """The text that `--help=TOPIC` prints; exits with 2 for an unknown topic.

        Args:
            topic: `all`, the title of a group of options, or empty for the flags in `common`.
        """
        groups = [g for g in self._action_groups if g._group_actions]
        titles = [g.title or "" for g in groups]
        topics = ["all", *(title for title in titles if title not in OWN_GROUPS)]
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
                f"These are the most used of {number} options. --help=all lists all, --help=GROUP "
                f"those of a group: {', '.join(topics[1:])}."
            )
        return formatter.format_help()

    def _in(self, action: argparse.Action) -> bool:
        """Whether plain `--help` lists an argument."""
        return not action.option_strings or not self.common.isdisjoint(action.option_strings)

    def error(self, message: str) -> NoReturn:
        """Prints a line of usage and the message, and exits with 2."""
        hint = f"(`{self.prog} --help` lists the flags)"
        self.exit(2, f"usage: {self._usage()}   {hint}\n{self.prog}: {message}\n")

    def _usage(self) -> str:
        """Line with the command and its positional arguments."""
        formatter = argparse.HelpFormatter(prog=f"{self.prog} [FLAGS]", width=WIDTH)
        formatter.add_usage(None, [a for a in self._actions if not a.option_strings], [])
        return formatter.format_help().strip().removeprefix("usage: ")

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
            word = flag.replace("_", "-")
            meant = [name for name in known if name.startswith(word)][:MOST_SUGGESTED]
            meant = meant or difflib.get_close_matches(word, known, 1, SIMILARITY)
            descriptions.append(f"{flag} (did you mean {' or '.join(meant)}?)" if meant else flag)
        return f"unknown flag {', '.join(descriptions)}"

    def _news_of(self, flag: str) -> str | None:
        """What has become of a flag that was renamed, removed, refused or moved into a JSON object;
        None for any other flag."""
        old = flag.lstrip("-").removeprefix("no-").replace("-", "_")
        if old in REMOVED or old in REFUSED:
            return REMOVED.get(old) or REFUSED[old]
        name = RENAMED.get(old, old)
        for action in self._actions:
            if isinstance(action.type, ObjectOption) and name in action.type.hints:
                return f"it is now in {action.option_strings[0]} '{{\"{name}\": ...}}'"
        return None if name == old else f"it is now --{name.replace('_', '-')}"
