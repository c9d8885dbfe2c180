"""Separators: tokens at which a text can be split into independently tokenized pieces."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from tokenizers import AddedToken


def separators(added: Iterable[AddedToken], candidates: Collection[str]) -> re.Pattern[str] | None:
    """Pattern that matches the `candidates` before which any text can be split; None if there are
    none.

    The `tokenizers` library searches the raw text for special tokens before it normalizes the text
    between them, splits it into words and encodes these. The tokens of a text are therefore those
    of its pieces if each piece except the first begins with a special token, and no token extends
    across a cut. A token could do so if the special token strips the space before it, or begins
    with the end of another token.

    Args:
        added: all tokens that the tokenizer searches for before splitting words, possibly
            thousands.
        candidates: contents of candidate tokens.
    """
    tokens = list(added)
    tails = [token.content[1:] for token in tokens]
    found = [
        token.content
        for token in tokens
        if token.special and token.content in candidates and _stands_alone(token)
    ]
    found = [content for content in found if not _overlaps(content, tails)]
    return re.compile("|".join(map(re.escape, found))) if found else None


def _stands_alone(token: AddedToken) -> bool:
    """Whether a token is found wherever it occurs, regardless of adjacent text."""
    if token.normalized or token.lstrip or token.single_word or not token.content:
        return False
    first = token.content[0]
    # A letter would extend a preceding word, which may only match as a whole word.
    return not (first.isspace() or first.isalnum() or first == "_")


def _overlaps(content: str, tails: Iterable[str]) -> bool:
    """Whether a token that begins before `content` and ends with one of `tails` may consume part of
    `content`."""
    beginnings = tuple(content[:length] for length in range(1, len(content)))
    return any(content in tail or tail.endswith(beginnings) for tail in tails)
