"""Deletion and insertion within a block, as in LLaDA 2.2's decoding, on plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Moves(NamedTuple):
    mask: int
    delete: int
    split: int


def decide(
    block_logits: Callable[[Sequence[int]], torch.Tensor],
    block: Sequence[int | None],
    lead: int,
    special: Moves,
    *,
    threshold: float,
    edit_threshold: float,
    most_edits: int,
) -> tuple[list[int], int]:
    """Final tokens of a block, and the number of passes over it."""
    size = len(block)
    ids = [special.mask if token is None else token for token in block]
    original = [token is None for token in block]
    seen: set[tuple[int, ...]] = set()
    proposed: list[set[int]] = [set() for _ in range(size)]
    edits = updates = 0
    while True:
        scores = block_logits(ids)
        shares = scores.softmax(-1)
        confidence, tokens = (part.tolist() for part in shares.max(-1))
        masked = [place for place in range(lead, size) if ids[place] == special.mask]
        waiting = [place for place in masked if original[place]]
        updates += 1
        edits += not waiting
        is_last = edits >= most_edits if most_edits else not waiting
        is_last = is_last or updates > size + most_edits
        if not is_last:
            for place in waiting:
                if tokens[place] == special.mask:
                    tokens[place] = best(scores[place], {special.mask})
                    confidence[place] = float(shares[place, tokens[place]])
        write = set(masked)
        if waiting and not is_last:
            least = 1 + len(masked) - len(waiting)
            write = {place for place in masked if confidence[place] > threshold}
            if len(write) < least:
                write = set(sorted(masked, key=lambda place: -confidence[place])[:least])
            if not most_edits and write.issuperset(waiting):
                is_last, write = True, set(masked)
        write |= {
            place
            for place in range(lead, size)
            if place not in masked
            and tokens[place] != ids[place]
            and confidence[place] > edit_threshold
        }
        if not write:
            return ids, updates
        if is_last:
            for place in write:
                if tokens[place] in special:
                    tokens[place] = best(scores[place], set(special))
        elif tuple(ids) in seen and (
            changing := [place for place in sorted(write) if tokens[place] != ids[place]]
        ):
            place = min(changing, key=lambda place: confidence[place])
            mask = {special.mask} if place in waiting else set()
            tokens[place] = best(scores[place], proposed[place] | mask)
        seen.add(tuple(ids))
        for place in write:
            proposed[place].add(tokens[place])
        after, flags = list(ids[:lead]), original[:lead]
        for place in range(lead, size):
            token = tokens[place] if place in write else ids[place]
            if place in write and token == special.delete:
                continue
            if place in write and token == special.split:
                after, flags = [*after, special.mask], [*flags, False]
                token = ids[place]
            after, flags = [*after, token], [*flags, original[place]]
        missing = max(0, size - len(after))
        after = (after + [special.mask] * missing)[:size]
        original = (flags + [False] * missing)[:size]
        if is_last:
            return after, updates + (after != ids)
        ids = after


def best(scores: torch.Tensor, without: set[int]) -> int:
    left = scores.clone()
    left[sorted(without)] = -torch.inf
    return int(left.argmax())
