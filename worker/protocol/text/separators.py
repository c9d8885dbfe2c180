"""Separators: tokens before which a text can be cut and its pieces tokenized by themselves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from tokenizers import AddedToken


def separators(added: Iterable[AddedToken], wanted: Collection[str]) -> re.Pattern[str] | None:
    """Pattern of the `wanted` tokens before which any text can be cut; None if there are none.

    The library looks for special tokens in the text as it stands, before it normalizes what lies
    between two of them, splits it into words and encodes these. So the tokens of a text are those
    of its pieces, where each piece but the first begins with a special token and no token reaches
    across the cut: none takes up space before itself, or begins with what ends another one.

    Args:
        added: all tokens that the tokenizer looks for before it splits words, perhaps thousands.
        wanted: contents of the tokens that would serve.
    """
    tokens = list(added)
    tails = [token.content[1:] for token in tokens]
    found = [
        token.content
        for token in tokens
        if token.special and token.content in wanted and _stands_alone(token)
    ]
    found = [content for content in found if not _overlaps(content, tails)]
    return re.compile("|".join(map(re.escape, found))) if found else None


def _stands_alone(token: AddedToken) -> bool:
    """Whether a token is found wherever it is written, whatever is beside it."""
    if token.normalized or token.lstrip or token.single_word or not token.content:
        return False
    first = token.content[0]
    # A letter would make part of a word of what is before it, which may ask for whole words.
    return not (first.isspace() or first.isalnum() or first == "_")


def _overlaps(content: str, tails: Iterable[str]) -> bool:
    """Whether a token with one of these tails, begun before `content`, may take part of it."""
    beginnings = tuple(content[:length] for length in range(1, len(content)))
    return any(content in tail or tail.endswith(beginnings) for tail in tails)
