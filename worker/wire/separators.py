"""Tokens before which a text can be cut, and its pieces tokenized by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken


def separators(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Matches all tokens among `added` before which any text can be cut; None if there are none.

    The library looks for special tokens in the text as it stands, before it normalizes what lies
    between two of them, splits it into words and encodes these. So the tokens of a text are those
    of its pieces, where each piece but the first begins with a special token and no token reaches
    across the cut: none swallows space before itself, or begins with what ends another one.
    """
    tokens = list(added)
    contents = [token.content for token in tokens]
    found = [
        token.content
        for token in tokens
        if token.special and _stands_alone(token) and not _overlaps(token.content, contents)
    ]
    return re.compile("|".join(map(re.escape, found))) if found else None


def _stands_alone(token: AddedToken) -> bool:
    """Whether it is found wherever it is written, whatever is beside it."""
    if token.normalized or token.lstrip or token.single_word or not token.content:
        return False
    first = token.content[0]
    # A letter would make part of a word of what is before it, which may ask for whole words.
    return not (first.isspace() or first.isalnum() or first == "_")


def _overlaps(content: str, others: Iterable[str]) -> bool:
    """Whether one of these, begun before `content`, may take part of it."""
    beginnings = [content[:length] for length in range(1, len(content))]
    return any(
        content in other[1:] or any(other.endswith(start) for start in beginnings if other != start)
        for other in others
    )
