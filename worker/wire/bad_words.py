"""Bad words as tokens."""

from __future__ import annotations

from worker.wire.sampling import SamplingParams
from worker.wire.tokenizer import Tokenizer


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same parameters with `bad_words` spelled in tokens, as the worker needs them.

    A word counts at the start of a text and, where that only changes its first token, behind a
    space too, as with vLLM.

    Raises:
        ValueError: a word has no tokens.
    """
    if not sampling.bad_words:
        return sampling
    found = [*sampling.bad_words_token_ids]
    for word in sampling.bad_words:
        text = word.lstrip() or word
        plain = tokenizer.encode(text, add_special_tokens=False)
        if not plain:
            raise ValueError(f"bad_words holds {word!r}, which has no tokens")
        found.append(tuple(plain))
        spaced = tokenizer.encode(" " + text, add_special_tokens=False)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(tuple(spaced))
    return sampling.amended(bad_words=(), bad_words_token_ids=tuple(found))
