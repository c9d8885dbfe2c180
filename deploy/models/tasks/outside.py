"""Messages that the demo model cannot answer: other languages, code, pasted text and nonsense.

All of them have the same answer, which describes what the demo model can do, so that unrelated
messages get a sentence instead of noise. The messages vary as widely as possible.
"""

from __future__ import annotations

from random import Random
from typing import Final

from deploy.models.sample import Sample, Turn
from deploy.models.tasks.smalltalk import UNKNOWN
from deploy.models.tasks.topics import (
    ASKED,
    CODE,
    FOREIGN,
    PLACES,
    SUBJECTS,
    THINGS,
    VERBS,
    WORDS,
)
from deploy.models.words import invented_word, sentence

_SCRIPTS: Final = (
    *((0x4E00, 0x9FA5), (0x3041, 0x30FE), (0xAC00, 0xD7A3), (0x0410, 0x044F), (0x0391, 0x03C9)),
    *((0x0621, 0x064A), (0x05D0, 0x05EA), (0x0905, 0x0939), (0x0E01, 0x0E3A), (0x00C0, 0x00FF)),
    *((0x1F300, 0x1F64F), (0x2190, 0x22FF), (0x10A0, 0x10FF), (0x0985, 0x09B9), (0x0021, 0x007E)),
)
"""Ranges of code points: scripts, emoji, symbols and ASCII."""
_CJK: Final = 3
"""Number of leading ranges (CJK scripts) whose words are joined without spaces."""
_TEXT: Final = (
    *("Summarize this text: {x}", "Translate to German: {x}", "{x}", "What does this mean? {x}"),
    *("Fix the grammar: {x}", "Is this true? {x}", "{x} What do you think?", "Explain: {x}"),
    *("Rewrite this in a formal tone: {x}", "TL;DR {x}", "Answer this email: {x}"),
)
_SUMS: Final = (
    *("What is the square root of {a}?", "sqrt({a})", "What is {a} percent of {b}?", "{a}^{b}"),
    *("Solve x + {a} = {b}.", "{a}x + {b} = 0", "Is {a} a prime number?", "sin({a})"),
    *("What is the integral of x^{a}?", "log({a})", "Convert {a} miles to kilometers.", "{a}!"),
    *("How many days are {a} weeks?", "What is {a} in binary?", "round({a}.{b})", "{a}"),
)
_MARKS: Final = (
    *(".", "?", "!", "...", "??", "-", "--", "***", "/", "\\", '"', "()", "[]", "{}", "<>", "$"),
    *(" ", "\n", "\n\n", "\t", "\u00a0", "#", "@", "~", "^", "=", "_", "|", ":)", ";", ",", "''"),
)
_KEYS: Final = ("asdfghjkl", "qwertyuiop", "zxcvbnm", "0123456789", "abcdefghijklmnopqrstuvwxyz")


def outside(rng: Random) -> Sample:
    """A message that belongs to no other family, and the common answer."""
    kinds = (
        _asked,
        _asked,
        _asked,
        _foreign,
        _foreign,
        _words,
        _script,
        _code,
        _text,
        _sum,
        _marks,
    )
    asked = rng.choice(kinds)(rng)
    if rng.random() < 0.1:
        asked = rng.choice((asked.lower(), asked.upper(), asked.rstrip("?.!")))
    return Sample(family="outside", turns=(Turn(asked, UNKNOWN),), keys=())


def _asked(rng: Random) -> str:
    """A question or a wish in English, sometimes followed by another one."""
    asked = rng.choice(ASKED).format(
        s=rng.choice(SUBJECTS),
        t=_thing(rng),
        u=_thing(rng),
        p=rng.choice(PLACES),
        v=rng.choice(VERBS),
        w=rng.choice(WORDS),
        n=rng.randrange(2, 2100),
    )
    kind = rng.random()
    if kind < 0.12:
        return f"{rng.choice(('Please', 'Hi,', 'Hello!', 'Can you help me?', 'So,'))} {asked}"
    return f"{asked} {_asked(rng)}" if kind < 0.2 else asked


def _thing(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.1:
        return invented_word(rng)
    return rng.choice(WORDS) if kind < 0.3 else rng.choice(THINGS)


def _foreign(rng: Random) -> str:
    """One to three phrases in a language other than English, sometimes truncated."""
    language = rng.choice(FOREIGN)
    phrases = rng.choices(language, k=rng.choice((1, 1, 1, 2, 3)))
    text = " ".join(phrases)
    if rng.random() < 0.25:
        start = rng.randrange(len(text))
        text = text[start : start + rng.randrange(3, 40)].strip() or text
    return text


def _words(rng: Random) -> str:
    """A sequence of English words, invented words and random characters."""
    words = [_any_word(rng) for _ in range(rng.choice((1, 1, 2, 3, 4, 6, 9, 14, 25)))]
    text = " ".join(words)
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:] + rng.choice(("", ".", "?", "!"))
    return text


def _any_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.15:
        return "".join(rng.choices(rng.choice(_KEYS), k=rng.randrange(2, 12)))
    if kind < 0.3:
        return invented_word(rng)
    return rng.choice(WORDS if kind < 0.75 else VERBS)


def _script(rng: Random) -> str:
    """Random characters of a script, so that training covers all bytes."""
    index = rng.randrange(len(_SCRIPTS))
    first, last = _SCRIPTS[index]
    words = [
        "".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 9)))
        for _ in range(rng.choice((1, 1, 2, 3, 5)))
    ]
    return ("" if index < _CJK else " ").join(words)


def _code(rng: Random) -> str:
    code = "\n".join(rng.choices(CODE, k=rng.choice((1, 1, 2, 4, 8)))).format(
        a=rng.choice(WORDS), b=rng.choice(WORDS), n=rng.randrange(1000)
    )
    form = rng.choice(
        ("{x}", "```\n{x}\n```", "What does this do?\n{x}", "Fix this code:\n```python\n{x}\n```")
    )
    return form.replace("{x}", code)


def _text(rng: Random) -> str:
    """One to four sentences, sometimes a whole page, usually with a task about them."""
    num_sentences = rng.randrange(8, 40) if rng.random() < 0.15 else rng.randrange(1, 5)
    makers = (_asked, _words, _foreign, sentence)
    text = " ".join(rng.choice(makers)(rng) for _ in range(num_sentences))
    # A plain sentence without a question could be a request to copy it.
    return rng.choice(_TEXT).replace("{x}", text)


def _sum(rng: Random) -> str:
    return rng.choice(_SUMS).format(a=rng.randrange(1, 1000), b=rng.randrange(1, 100))


def _marks(rng: Random) -> str:
    return "".join(rng.choices(_MARKS, k=rng.choice((1, 1, 1, 2, 3, 6))))
