"""`group_order`: the order in which requests that arrive together are placed."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.blocks import BlockKey, PromptBlocks


def group_order(prompts: Sequence[PromptBlocks], keys: Sequence[BlockKey]) -> list[int]:
    """Indices of `prompts`, grouped by their first block, the group with the most tokens first.

    Within a group, prompts that share a longer prefix are adjacent. Placed in this order, each
    request finds the blocks in flight of its group's first request, and large groups are spread
    over the workers before small ones fill the gaps.
    """
    if not keys:
        return list(range(len(prompts)))
    groups: dict[tuple[int, ...], list[int]] = {}
    paths = [_path(prompt, keys[0]) for prompt in prompts]
    for place, path in enumerate(paths):
        groups.setdefault(path[:1], []).append(place)
    for members in groups.values():
        members.sort(key=lambda place: (paths[place], -prompts[place].num_tokens))
    return [
        place
        for members in sorted(
            groups.values(), key=lambda members: -sum(prompts[p].num_tokens for p in members)
        )
        for place in members
    ]


def _path(prompt: PromptBlocks, key: BlockKey) -> tuple[int, ...]:
    """Hashes of the 1st, 2nd, 4th, 8th … block, used to sort prompts with a long common prefix next
    to each other."""
    hashes = prompt.hashes(key)
    path = []
    length = 1
    while length <= len(hashes):
        path.append(hashes.item(length - 1))
        length *= 2
    return tuple(path)
