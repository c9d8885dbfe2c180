"""Options: fields of nested configuration dataclasses under the flat names of flags and config
files.

A configuration consists of groups, each of which is a dataclass in a field with the metadata of
`group`. Flags, config files and `LLM` have the fields of all groups in one flat namespace; code
reads them from the groups.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_GROUP = "group"
"""Metadata key of fields that are groups; its value is the title of the group in the CLI's help."""


class Option(NamedTuple):
    """A field of a configuration's dataclass, or of one of its groups."""

    name: str
    """Key in config files. On the command line, the option is a flag of this name with dashes, or a
    key in the JSON object of another flag."""
    field: Field[Any]
    """The field. Its metadata may have `option`, the option's name if it differs from the field's,
    and `within`, the flag whose JSON object contains the option."""
    hint: Any
    """Type of the value."""
    owner: type
    """Dataclass of the field."""
    title: str
    """Title of the option's group in the CLI's help; empty for the configuration's own fields."""


def group(title: str = "") -> Mapping[str, str]:
    """Metadata of a field that is a group of options: a dataclass whose fields all have defaults.

    If the field's default is None, None disables the feature, and the dataclass must have a
    property `enabled`.

    Args:
        title: title of the group in the CLI's help; empty to list its options with those that
            are in no group.
    """
    return {_GROUP: title}


def options_of(cls: type) -> Mapping[str, Option]:
    """Options of a dataclass and its groups, by name."""
    return _options_of(cls)


@cache
def _options_of(cls: type) -> Mapping[str, Option]:
    found = list[Option]()
    for item, hint in _fields_of(cls):
        if (title := item.metadata.get(_GROUP)) is not None:
            members = options_of(_group_kind(hint)).values()
            found += (member._replace(title=member.title or title) for member in members)
        else:
            found.append(Option(item.metadata.get("option", item.name), item, hint, cls, ""))
    by_name = {option.name: option for option in found}
    assert len(by_name) == len(found), f"two options of {cls.__name__} have the same name"
    return by_name


def option_name(options: Any, name: str) -> str:
    """User-visible name of an option: its flag, or its key in the JSON object of another flag.

    Args:
        options: a dataclass of options, or an instance.
        name: name of the option.
    """
    cls = options if isinstance(options, type) else type(options)
    flag = options_of(cls)[name].field.metadata.get("within")
    return f"{name} in {flag}" if flag else "--" + name.replace("_", "-")


def from_options(cls: type[T], values: Mapping[str, Any]) -> T:
    """Creates an instance of a dataclass with the given options, and defaults for the others.

    Raises:
        ValueError: an option is unknown or out of range; the message names it.
    """
    if unknown := [name for name in values if name not in options_of(cls)]:
        known = ", ".join(options_of(cls))
        raise ValueError(f"unknown options {', '.join(unknown)} (supported: {known})")
    found: T = _build(cls, values)
    return found


def option_values(config: Any) -> dict[str, Any]:
    """Values of all options of a dataclass and its groups. A disabled group has its defaults."""
    found = dict[str, Any]()
    for item, hint in _fields_of(type(config)):
        value = getattr(config, item.name)
        if _GROUP not in item.metadata:
            found[item.metadata.get("option", item.name)] = value
        elif value is not None:
            found |= option_values(value)
        else:
            members = options_of(_group_kind(hint)).values()
            found |= {member.name: member.field.default for member in members}
    return found


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    arguments = dict[str, Any]()
    for item, hint in _fields_of(cls):
        if _GROUP in item.metadata:
            found = _build(_group_kind(hint), values)
            is_off = item.default is None and not found.enabled
            arguments[item.name] = None if is_off else found
        elif (name := item.metadata.get("option", item.name)) in values:
            arguments[item.name] = values[name]
    return cls(**arguments)


def _fields_of(cls: type) -> Iterator[tuple[Field[Any], Any]]:
    """Fields of a dataclass, with their types."""
    hints = _type_hints(cls)
    return ((item, hints[item.name]) for item in fields(cls))


@cache  # it evaluates the annotations of all fields
def _type_hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _group_kind(hint: Any) -> Any:
    """Dataclass of a field that is a group: the field's type, without None."""
    if isinstance(hint, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint
