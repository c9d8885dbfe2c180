"""Patterns for the formats defined by JSON Schema.

Each pattern matches the part of its RFC that all validators agree on: no leap seconds, no "--" in
host names. Formats that JSON Schema does not define are ignored, as in validators.
"""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """Description of the texts that a value of the keyword `format` allows."""

    pattern: str
    """Regular expression (Rust syntax) that must match the whole text."""
    max_length: int | None = None


_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_N = "[0-9]{1,9}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_LABEL = "(?:[A-Za-z0-9]|-[A-Za-z0-9]){0,30}"
_HOST = rf"(?:[A-Za-z0-9]{_LABEL}\.)*[A-Za-z]{_LABEL}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_HEX}:){{7}}{_HEX}",
        *(f"(?:{_HEX}:){{1,{left}}}(?::{_HEX}){{1,{7 - left}}}" for left in range(1, 7)),
        f"(?:{_HEX}:){{1,7}}:",
        f":(?::{_HEX}){{1,7}}",
        "::",
    ]
)
_ESCAPE = "%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_ESCAPE})"
_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_ESCAPE})"
_AUTHORITY = f"//(?:(?:{_NAME}|:)*@)?{_NAME}*(?::[0-9]{{1,5}})?(?:/{_PCHAR}*)*"
_ABSOLUTE = f"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_PCHAR}+(?:/{_PCHAR}*)*){_TAIL}"
_FIRST = rf"(?:{_NAME}|@)"
_RELATIVE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|{_FIRST}+(?:/{_PCHAR}*)*)?{_TAIL}"
_VARIABLE = "[A-Za-z0-9_]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS = {
    "date": Format(_DATE),
    "date-time": Format(f"{_DATE}T{_TIME}"),
    "time": Format(_TIME),
    "duration": Format(f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)"),
    "email": Format(_EMAIL),
    "idn-email": Format(_EMAIL),
    "hostname": Format(_HOST, 253),
    "idn-hostname": Format(_HOST, 253),
    "ipv4": Format(rf"(?:{_BYTE}\.){{3}}{_BYTE}"),
    "ipv6": Format(_IPV6),
    "uri": Format(_URI),
    "iri": Format(_URI),
    "uri-reference": Format(f"{_URI}|{_RELATIVE}"),
    "iri-reference": Format(f"{_URI}|{_RELATIVE}"),
    "uri-template": Format(
        rf"(?:[A-Za-z0-9\-._~:/?#@!$&()*+,;=]|{_ESCAPE}|\{{{_VARIABLE}(?:,{_VARIABLE})*\}})*"
    ),
    "uuid": Format("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    "json-pointer": Format(_POINTER),
    "relative-json-pointer": Format(f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})"),
}
"""Supported formats by name."""

UNSUPPORTED = frozenset({"regex"})
"""Formats defined by JSON Schema that cannot be described by a pattern."""
