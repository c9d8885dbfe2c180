r"""Translates regular expressions of JSON schemas to the syntax of llguidance (Rust).

ECMA-262 and Python's `re` disagree on some classes (`\d`, `\w`, `.`). A translated pattern
matches only texts that match the original in both languages.
"""

from __future__ import annotations

import re

from worker.core.grammar.base import GrammarError

NOT_ASCII = "^(?s:.)*[^ -~](?s:.)*$"
"""Translated pattern that matches texts with a character other than printable ASCII. Such property
names are excluded if names that match no pattern have a separate schema: the two languages might
disagree on which names these are."""
ANY = r"(?s:.)*"
"""Translated pattern that matches any text."""

_SPACES = r"\t-\r\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
"""Characters that are whitespace in both languages."""
_NOT_SPACES = _SPACES + r"\x{1c}-\x{1f}\x{85}\x{feff}"
"""Characters that are whitespace in at least one of the languages."""
_IN_BOTH = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
"""Characters that are in a class in both languages."""
_IN_EITHER = {"d": r"\p{Decimal_Number}\p{Cn}", "w": r"\p{L}\p{N}\p{Cn}_", "s": _NOT_SPACES}
"""Characters that are in a class in at least one of the languages, including unassigned ones."""
_WRITABLE = r"[^\x{0}-\x{7}\x{b}\x{e}-\x{1f}]"
"""Characters that JSON can represent without code point escapes. In llguidance 1.9, a class with
all control characters would also include the quote and the backslash."""
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_PROPERTY = re.compile(r"[pP]\{\w+(?:=\w+)?\}")
_UNICODE = re.compile(r"u(?:([0-9a-fA-F]{4})|\{([0-9a-fA-F]{1,6})\})")
_EQUIVALENT = {
    # zod's z.email(): its lookaheads require that no dot begins the local part or follows another.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$": r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}
"""Common patterns with lookaheads, and equivalent patterns without them."""


def translated(pattern: str, *, is_ascii: bool = False) -> str:
    """Translates a pattern to one that matches whole texts, `^(?:...)$`.

    Args:
        is_ascii: whether to match only printable ASCII, on which both languages agree.

    Raises:
        GrammarError: the pattern is malformed or has an unsupported feature.
    """
    reader = _Reader(_EQUIVALENT.get(pattern, pattern), is_ascii=is_ascii)
    whole = reader.alternatives(is_first=True, is_last=True)
    if reader.at < len(reader.text):
        raise reader.error("unbalanced parenthesis")
    return f"^(?:{whole})$"


def literal(text: str) -> str:
    """Translated pattern that matches a literal text."""
    return "".join(_escaped(ord(character)) for character in text)


def _escaped(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF:
        raise GrammarError("JSON schema: unpaired surrogates in 'pattern' are not supported")
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


class _Reader:
    """Recursive-descent parser of a pattern, which returns its translation.

    `is_first` and `is_last` are set at the beginning and end of a match, where anchors are allowed.
    Without an anchor, any text may precede or follow.
    """

    def __init__(self, text: str, *, is_ascii: bool) -> None:
        self.text = text
        self._within = "[ -~]" if is_ascii else _WRITABLE
        self._any = "[ -~]*" if is_ascii else ANY
        self.at = 0

    def error(self, problem: str) -> GrammarError:
        return GrammarError(
            f"JSON schema: 'pattern': {problem} (at character {self.at} of {self.text!r})"
        )

    def alternatives(self, *, is_first: bool, is_last: bool) -> str:
        """Translates alternatives up to a closing parenthesis or the end of the pattern."""
        found = [self._sequence(is_first, is_last)]
        while self._taken("|"):
            found.append(self._sequence(is_first, is_last))
        return "|".join(found)

    def _sequence(self, is_first: bool, is_last: bool) -> str:
        begins = is_first
        starts_free, ends_free = is_first, is_last
        while is_first and self._taken("^"):
            starts_free = False
        parts: list[str] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if is_last and self._is_end_anchor():
                ends_free = False
                continue
            if self.text[self.at] in "^$":
                raise self.error("anchors are supported only at the ends of a pattern")
            part, is_anchored = self._term(begins and not parts and starts_free, is_last)
            if is_anchored:
                starts_free, ends_free = False, False
            parts.append(part)
        middle = "".join(parts)
        return (self._any if starts_free else "") + middle + (self._any if ends_free else "")

    def _is_end_anchor(self) -> bool:
        """Consumes a `$` that ends the sequence, if it comes next; returns whether it did."""
        if self.text[self.at] != "$" or self.text[self.at + 1 : self.at + 2] not in ("", "|", ")"):
            return False
        self.at += 1
        return True

    def _term(self, is_first: bool, is_last: bool) -> tuple[str, bool]:
        """Translates one atom with its quantifier; also returns whether it has anchors at both
        ends."""
        begin = self.at
        if self._taken("("):
            # A group that spans the whole sequence, as in (^a$|^b$), may contain anchors.
            closing = self._closing(begin)
            is_whole = closing + 1 == len(self.text) or self.text[closing + 1] in "|)"
            has_anchors = is_first and is_last and is_whole
            self._open_group()
            inner = self.alternatives(is_first=has_anchors, is_last=has_anchors)
            if not self._taken(")"):
                raise self.error("missing closing parenthesis")
            return f"(?:{inner})" + self._quantifier(), has_anchors
        return self._atom() + self._quantifier(), False

    def _closing(self, begin: int) -> int:
        """Index of the parenthesis that closes the group."""
        depth, at, in_class = 0, begin, False
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif in_class:
                in_class = character != "]"
            elif character == "[":
                in_class = True
            elif character in "()":
                depth += 1 if character == "(" else -1
                if not depth:
                    return at
            at += 1
        raise self.error("missing closing parenthesis")

    def _open_group(self) -> None:
        if self.text.startswith("?", self.at):
            found = _GROUP.match(self.text, self.at)
            if found is None:
                raise self.error("lookarounds and inline flags are not supported")
            self.at = found.end()

    def _atom(self) -> str:
        character = self.text[self.at]
        self.at += 1
        if character == "\\":
            kind, value = self._escape(in_class=False)
            return self._set(_members(kind, value, in_either=False))
        if character == "[":
            return self._class()
        if character == ".":
            return self._set(r"\n\r\x{2028}\x{2029}", is_negated=True)
        if character in "*+?":
            self.at -= 1
            raise self.error("nothing to repeat")
        if character == "{" and _QUANTIFIER.match(self.text, self.at - 1):
            raise self.error("nothing to repeat")
        return _escaped(ord(character))

    def _quantifier(self) -> str:
        if self.text.startswith("{,", self.at):
            raise self.error("the minimum of a quantifier is missing: write {0,n}")
        found = _QUANTIFIER.match(self.text, self.at)
        if found is None:
            return ""
        if found[1] and found[3] and int(found[1]) > int(found[3]):
            raise self.error("a quantifier's minimum exceeds its maximum")
        self.at = found.end()
        self._taken("?")  # lazy: matches the same texts
        if self.text[self.at : self.at + 1] in ("*", "+", "?"):
            raise self.error("multiple repeat")
        return found[0]

    def _class(self) -> str:
        is_negated = self._taken("^")
        members: list[str] = []
        while not self._taken("]"):
            kind, value = self._member()
            is_range = (
                self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] != "]"
            )
            if is_range:
                self.at += 1
                last_kind, last = self._member()
                if kind != "code" or last_kind != "code" or int(value) > int(last):
                    raise self.error("bad character range")
                members.append(f"{_escaped(int(value))}-{_escaped(int(last))}")
            else:
                members.append(_members(kind, value, in_either=is_negated))
        if not members:
            return self._set(r"\x{0}-\x{10ffff}", is_negated=not is_negated)
        return self._set("".join(members), is_negated=is_negated)

    def _member(self) -> tuple[str, str]:
        if self.at >= len(self.text):
            raise self.error("unterminated character class")
        character = self.text[self.at]
        self.at += 1
        if character == "\\":
            return self._escape(in_class=True)
        if character == "[" and self.text[self.at : self.at + 1] == ":":
            raise self.error("POSIX classes are not supported")
        return "code", str(ord(character))

    def _escape(self, *, in_class: bool) -> tuple[str, str]:
        """Parses the escape after a backslash; returns its kind (code, class or property) and its
        value."""
        text, at = self.text, self.at
        character = text[at : at + 1]
        self.at += 1
        if character and character in "dDwWsS":
            return "class", character
        if character in _CONTROLS:
            return "code", str(_CONTROLS[character])
        if character == "0" and not text[at + 1 : at + 2].isdigit():
            return "code", "0"
        if character == "b" and in_class:
            return "code", "8"
        if found := _PROPERTY.match(text, at):
            self.at = found.end()
            return "property", found[0]
        if character == "x" and re.fullmatch("[0-9a-fA-F]{2}", text[at + 1 : at + 3]):
            self.at = at + 3
            return "code", str(int(text[at + 1 : at + 3], 16))
        if found := _UNICODE.match(text, at):
            self.at = found.end()
            code = int(found[1] or found[2], 16)
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(text, self.at)
            if found[1] and 0xD800 <= code < 0xDC00 and low:
                self.at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            if code > 0x10FFFF:
                raise self.error("a code point is too large")
            return "code", str(code)
        if not character or character.isalnum():
            raise self.error(f"\\{character} is not supported")
        return "code", str(ord(character))

    def _set(self, members: str, *, is_negated: bool = False) -> str:
        return f"[[{'^' if is_negated else ''}{members}]&&{self._within}]"

    def _taken(self, character: str) -> bool:
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        return True


def _members(kind: str, value: str, *, in_either: bool) -> str:
    """Members that an escape stands for in a character class.

    Args:
        kind: kind of the escape.
        value: value of the escape.
        in_either: whether to include characters that match in either language, as needed for
            negated classes.
    """
    if kind == "code":
        return _escaped(int(value))
    if kind == "property":
        return f"\\{value}"
    name = value.lower()
    if name == value:
        return (_IN_EITHER if in_either else _IN_BOTH)[name]
    return f"[^{(_IN_BOTH if in_either else _IN_EITHER)[name]}]"
