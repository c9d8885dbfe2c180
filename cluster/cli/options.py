"""Command-line flags generated from configuration dataclasses and their field docstrings."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any

import msgspec

from cluster.config import REMOVED
from worker.protocol.analyzed import analyzed
from worker.protocol.options import Option, options_of


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type,
    exclude: Collection[str] = (),
) -> None:
    """Adds a flag for each option of the dataclass `cls`; inherited fields come last.

    A flag that is not given sets no attribute of the namespace.

    A field's metadata may contain, in addition to the keys described by `Option`:
        flag: name of the flag if it differs from the field's; None if there is none.
        aliases: additional names of the flag.
        within: flag with a JSON object that has this field as a key; for rarely used options.
        separator: separator of the values of a tuple, which are then given in one argument.
        argparse: additional keyword arguments of `add_argument`.
    """
    shown = _shown(cls, exclude)
    _add_flags(parser, sorted(shown, key=lambda o: o.field.name not in cls.__annotations__), shown)


def add_option_groups(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    exclude: Collection[str] = (),
    *,
    description: str | None = None,
) -> None:
    """Adds the flags of a configuration with a section of the help for each group of options.

    Args:
        parser: receives the flags.
        title: title of the section with the options that are in no group.
        cls: dataclass of the configuration.
        exclude: names of options without a flag.
        description: text below that title.
    """
    shown, texts = _shown(cls, exclude), {title: description}
    sections = dict[str, list[Option]]()
    for option in sorted(shown, key=lambda option: bool(option.title)):
        sections.setdefault(option.title or title, []).append(option)
    for name, members in sections.items():
        _add_flags(parser.add_argument_group(name, texts.get(name)), members, shown)


def _shown(cls: type, exclude: Collection[str]) -> list[Option]:
    """Options of a dataclass that are flags, or keys of a flag's JSON object."""
    return [
        option
        for name, option in options_of(cls).items()
        if name not in exclude and option.field.metadata.get("flag", "") is not None
    ]


def _add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    options: Sequence[Option],
    all_options: Sequence[Option],
) -> None:
    """Adds the flags of some options, and those of JSON objects whose first key is one of these
    options.

    Args:
        parser: receives the flags.
        options: options of this section.
        all_options: options of all sections; the keys of an object may be in any of them.
    """
    for option in options:
        metadata = option.field.metadata
        if "within" in metadata:
            continue
        parser.add_argument(
            flag_name(option),
            *metadata.get("aliases", ()),
            dest=option.name,
            default=argparse.SUPPRESS,
            help=_help(option),
            **{**_argument_kind(option.hint, option.field), **metadata.get("argparse", {})},
        )
    for flag in _object_flags(options):
        members = [o for o in all_options if o.field.metadata.get("within") == flag]
        if members[0] not in options:
            continue
        lines = "; ".join(f"{member.name}: {_help(member)}" for member in members)
        others = [o for o in all_options if o.field.metadata.get("key", ("",))[0] == flag]
        if others:
            keys = " and ".join(one.field.metadata["key"][1] for one in others)
            flags = " and ".join(map(flag_name, others))
            lines = f"{lines}; {keys}: vLLM's names for {flags}"
        parser.add_argument(
            flag,
            dest=_destination(flag),
            default=argparse.SUPPRESS,
            metavar="JSON",
            type=ObjectOption({member.name: member.hint for member in members}, others),
            help=f"JSON object with any of these keys, as in config files. {lines}",
        )


class ObjectOption:
    """Type of a flag whose value is a JSON object, for argparse.

    Args:
        hints: types of the object's values by key.
        others: options with their own flags that the object may also contain. In their metadata,
            `key` has the object's flag and the option's key in the object, and `spellings` maps
            alternative names of values to the option's values.
    """

    def __init__(self, hints: Mapping[str, Any], others: Sequence[Option] = ()) -> None:
        self._others = {option.field.metadata["key"][1]: option for option in others}
        self.hints = {**hints, **{key: option.hint for key, option in self._others.items()}}

    def __call__(self, text: str) -> dict[str, Any]:
        """The object's values, converted. Raises argparse.ArgumentTypeError if the text is not a
        JSON object, or has an unknown key or a value of the wrong type."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
        if not isinstance(given, dict):
            raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
        return {
            self._others[key].name if key in self._others else key: self._converted(key, value)
            for key, value in given.items()
        }

    def _converted(self, key: str, value: object) -> Any:
        if key not in self.hints:
            match = difflib.get_close_matches(key, self.hints, 1)
            hint = f"did you mean {match[0]}?" if match else f"supported: {', '.join(self.hints)}"
            hint = REMOVED.get(key, hint)
            raise argparse.ArgumentTypeError(f"unknown key {key!r} ({hint})")
        if key in self._others and isinstance(value, str):
            value = self._others[key].field.metadata.get("spellings", {}).get(value, value)
        try:
            return msgspec.convert(value, analyzed(self.hints[key]))
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{key}: {error}") from error


def given_options(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Values of the options of `cls` that were set by flags, by name; lists as tuples."""
    options = options_of(cls)
    given = {name: getattr(namespace, name) for name in options if hasattr(namespace, name)}
    for flag in _object_flags(options.values()):
        given |= getattr(namespace, _destination(flag), {})
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def flag_name(option: Option) -> str:
    """Flag of an option: its name with dashes, unless the field's metadata sets another."""
    metadata = option.field.metadata
    name = metadata.get("within") or metadata.get("flag") or "--" + option.name.replace("_", "-")
    assert isinstance(name, str)
    return name


def _object_flags(options: Iterable[Option]) -> list[str]:
    """Flags of the JSON objects that contain any of the given options, in the options' order."""
    flags = (option.field.metadata.get("within") for option in options)
    return list(dict.fromkeys(flag for flag in flags if flag is not None))


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def field_docstrings(cls: type) -> Mapping[str, str]:
    """Docstrings of all fields of a dataclass, as single lines by field name."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            docs |= _declared_docstrings(base)
    missing = [field.name for field in fields(cls) if field.name not in docs]
    assert not missing, f"{cls.__name__} has fields without a docstring: {', '.join(missing)}"
    return docs


@cache  # parsing a class takes several milliseconds, and classes share bases
def _declared_docstrings(cls: type) -> Mapping[str, str]:
    """Docstrings of the fields declared by the class itself, parsed from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def _argument_kind(hint: Any, field: Field[Any]) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for values of a field's type."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (option for option in options if option is not type(None))
        options = typing.get_args(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": options}
    if typing.get_origin(hint) is tuple:
        kind = {"type": options[0], "metavar": options[0].__name__.upper()}
        if separator := field.metadata.get("separator"):
            return _separated(options[0], separator)
        if options[0] is str:
            # nargs="+" would consume positional arguments after the flag.
            return {"action": "append", **kind}
        return {"action": "extend", "nargs": "+", **kind}
    assert hint in (int, float, str), f"no flag for a field of type {hint}"
    return {"type": hint, "metavar": hint.__name__.upper()}


def _separated(kind: type, separator: str) -> dict[str, Any]:
    """Keyword arguments of `add_argument` for several values in one argument, either separated or,
    as in vLLM, a JSON list."""

    def parse(text: str) -> tuple[Any, ...]:
        parts = json.loads(text) if text.startswith("[") else text.split(separator)
        return tuple(kind(part) for part in parts)

    name = kind.__name__.upper()
    parse.__name__ = f"list of {kind.__name__}"  # argparse: "invalid list of int value"
    return {"type": parse, "metavar": f"{name}{separator}..."}


def _help(option: Option) -> str:
    text = field_docstrings(option.owner)[option.field.name].replace("%", "%%")
    default = option.field.default
    if default in (None, MISSING, (), ""):
        return text
    if isinstance(default, tuple):
        default = option.field.metadata.get("separator", " ").join(map(str, default))
    shown = str(default).lower() if isinstance(default, bool) else default  # as in config files
    return f"{text} (default: {shown})"
