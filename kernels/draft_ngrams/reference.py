"""Prompt lookup on the host, row by row: the tokens' bytes are searched for their own end."""

from __future__ import annotations

import numpy as np
import torch

from kernels.draft_ngrams.base import NgramLookup


def draft_ngrams(
    token_pool: torch.Tensor, lookup: NgramLookup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look each row up by itself."""
    pool, count = token_pool.cpu().numpy(), lookup.count
    drafts: list[list[int]] = []
    lengths: list[int] = []
    for slot, last in zip(lookup.slots.tolist(), lookup.newest.tolist(), strict=True):
        tokens = pool[slot, : last + 1]
        place, length = _find(tokens.tobytes(), lookup.shortest, lookup.longest)
        draft = tokens[place : place + count].tolist()
        while len(draft) < count:
            draft += draft[: count - len(draft)]
        drafts.append(draft)
        lengths.append(length)
    device = token_pool.device
    shape = (len(drafts), lookup.count)
    return (
        torch.from_numpy(np.array(drafts, dtype=np.int32).reshape(shape)).to(device),
        torch.from_numpy(np.array(lengths, dtype=np.int64)).to(device),
    )


def _find(tokens: bytes, shortest: int, longest: int) -> tuple[int, int]:
    """Finds the longest earlier occurrence of the last tokens, the latest of those.

    Returns:
        The position behind it and its length; without any, the last token's position and 0.
    """
    # What begins an occurrence is one, too: the longest is found by bisection.
    found, length = len(tokens) // 4 - 1, 0
    low, high = shortest, min(longest, found)
    while low <= high:
        size = (low + high + 1) // 2 if length else low  # most have no occurrence at all
        place = _last_place(tokens, size)
        if place < 0:
            high = size - 1
        else:
            found, length, low = place, size, size + 1
    return found, length


def _last_place(tokens: bytes, size: int) -> int:
    """The position behind the latest earlier occurrence of the last tokens; -1 without any."""
    wanted = tokens[-4 * size :]
    start = tokens.rfind(wanted, 0, len(tokens) - 4)
    while start % 4 and start > 0:  # it begins within a token
        start = tokens.rfind(wanted, 0, start + len(wanted) - 1)
    return -1 if start < 0 else start // 4 + size
