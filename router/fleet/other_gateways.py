"""Prompts in flight of other gateways, by hashes of some of their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.fleet.in_flight import InFlight, PrefixNode
from worker.protocol.blocks import BlockHashes
from worker.protocol.messages import PromptInFlight

MIN_TOKENS = 256
"""Minimum number of uncached tokens for a prompt to be announced to other gateways. A shorter
prefill is done by about the time that the message arrives."""
_PER_OCTAVE = 512
"""Number of sampled lengths between a length and twice that length. The lengths of common prefixes
are exact up to 1,024 blocks, and within 1/512 beyond. In simulations of cold caches, the mean time
to first token with eight gateways is the same as with one; with 16 sampled lengths, it is 1.05 to
1.2 times as long."""
_WORD = np.dtype("<u4")
"""Type of a sampled hash: half of a block hash, since a collision only affects one decision."""
_MAX_BLOCKS = 1 << 24
"""Maximum number of blocks of a prompt."""


def sampled_blocks(hashes: BlockHashes) -> bytes:
    """The hashes at `_sampled_lengths` of a prompt, packed for PromptInFlight."""
    return _sampled(hashes).tobytes()


class OtherGatewaysPrompts:
    """A tree of the prompts that other gateways have sent and workers have not computed yet.

    Block hashes are chained, and all prompts are sampled at the same lengths. As in InFlight, two
    prompts therefore have equal hashes up to the last sampled length within their common prefix.
    """

    def __init__(self) -> None:
        self.has_prompts = False
        """Whether any prompt of another gateway is in flight."""
        self._tree = InFlight()
        self._nodes: dict[int, dict[int, PrefixNode]] = {}
        """Last node of each prompt, by the worker's row and the prompt's ordinal."""

    def __len__(self) -> int:
        """Number of other gateways' prompts in flight."""
        return len(self._tree)

    def add(self, row: int, prompts: Iterable[PromptInFlight]) -> None:
        """Adds prompts sent to the worker in `row`."""
        nodes = self._nodes.setdefault(row, {})
        for prompt in prompts:
            if prompt.sampled_blocks:
                hashes: NDArray[Any] = np.frombuffer(prompt.sampled_blocks, _WORD)
                nodes[prompt.ordinal] = self._tree.add(hashes, row)
                self.has_prompts = True

    def remove(self, row: int, ordinals: Iterable[int]) -> None:
        """Removes computed prompts; other ordinals, such as those of this gateway's prompts, are
        ignored."""
        nodes = self._nodes.get(row)
        if nodes:
            for ordinal in ordinals:
                node = nodes.pop(ordinal, None)
                if node is not None:
                    self._tree.remove(node, row)
            self.has_prompts = self._tree.has_prompts

    def drop(self, row: int) -> None:
        """Removes all prompts of a worker."""
        for node in self._nodes.pop(row, {}).values():
            self._tree.remove(node, row)
        self.has_prompts = self._tree.has_prompts

    def match(self, hashes: BlockHashes) -> list[tuple[int, int]]:
        """Prefixes that `hashes` shares with the prompts, shortest first, like InFlight.match.

        Lengths are rounded down to sampled ones.
        """
        lengths = _sampled_lengths(len(hashes))
        found = self._tree.match(_sampled(hashes))
        return [(rows, lengths.item(count - 1)) for rows, count in found]


def _sampled(hashes: BlockHashes) -> NDArray[Any]:
    if len(hashes) >= 2 * _PER_OCTAVE:  # shorter ones are sampled at each length
        hashes = hashes[_sampled_lengths(len(hashes)) - 1]
    return hashes.astype(_WORD)


@lru_cache(4096)
def _sampled_lengths(num_blocks: int) -> NDArray[np.intp]:
    """Prefix lengths in blocks at which a prompt's hashes are sampled; the last is the prompt's
    length."""
    count = int(_LENGTHS.searchsorted(num_blocks))
    return np.append(_LENGTHS[:count], num_blocks)


def _all_lengths() -> NDArray[np.intp]:
    lengths = list(range(1, 2 * _PER_OCTAVE))
    step = 1
    while lengths[-1] < _MAX_BLOCKS:
        step *= 2
        lengths += range(_PER_OCTAVE * step, 2 * _PER_OCTAVE * step, step)
    return np.array(lengths)


_LENGTHS = _all_lengths()
