"""The command line's parser: a mistake is told in two lines, with what was probably meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cluster.cli.options import ObjectOption
from cluster.config import REFUSED, REMOVED, RENAMED

SIMILARITY = 0.6
"""Ratio of difflib from which another flag is worth naming; its own default."""
WIDTH = 1000
"""Columns of the line about the usage, which is not broken."""


OWN_GROUPS = ("positional arguments", "options")
"""Titles that argparse gives."""
HELP_ON = "--help="
"""Begins a question for other options than the most used ones."""


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
        self.common: frozenset[str] = frozenset()
        """Flags that plain `--help` tells; all of them where it is empty."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses as argparse does, but leaves nothing unknown."""
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

    def format_help(self) -> str:
        """The text that `--help` prints."""
        return self.help_on("") if self.common else super().format_help()

    def help_on(self, topic: str) -> str:
        """The text that `--help=TOPIC` prints: `all`, the options of one group, or, where it is
        empty, those that users need most.

        Ends with 2 where there is no such group.
        """
        groups = [g for g in self._action_groups if g._group_actions]
        titles = [g.title or "" for g in groups]
        topics = ["all", *(title for title in titles if title not in OWN_GROUPS)]
        if topic and topic not in topics:
            self.error(f"--help={topic}: choose from {', '.join(topics)}")
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} [FLAGS] [model]", [], [])
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
                f"These are the most used of {number} options: --help=all tells all, --help=GROUP "
                f"those of {', '.join(topics[1:])}."
            )
        return formatter.format_help()

    def _in(self, action: argparse.Action) -> bool:
        """Whether plain `--help` tells of an argument."""
        return not action.option_strings or not self.common.isdisjoint(action.option_strings)

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
        """News of a flag that there was once; None for one that there never was."""
        old = flag.lstrip("-").removeprefix("no-").replace("-", "_")
        if old in REMOVED or old in REFUSED:
            return REMOVED.get(old) or REFUSED[old]
        name = RENAMED.get(old, old)
        for action in self._actions:
            if isinstance(action.type, ObjectOption) and name in action.type.hints:
                return f"it is now in {action.option_strings[0]} '{{\"{name}\": ...}}'"
        return None if name == old else f"it is now --{name.replace('_', '-')}"
