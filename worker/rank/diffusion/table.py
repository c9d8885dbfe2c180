"""Block table: the running block of every slot, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worker.plan.plan import Admit, BlockAdmit
from worker.protocol.analyzed import analyzed
from worker.protocol.diffusion import DiffusionParams, DllmAlgorithm
from worker.protocol.messages import TokenLogprobs
from worker.rank.diffusion.algorithms import ALGORITHMS
from worker.rank.diffusion.base import (
    BlockParams,
    DiffusionAlgorithm,
    IntArray,
    SpecialTokens,
)

_EDIT_THRESHOLD, _MAX_POST_EDIT_STEPS, _PENALTY, _ENTROPY_BOUND = 0.0, 16, 0.0, 0.35
"""Default parameters, as in SGLang's JointThreshold, and SDAR's entropy bound in nats; the
threshold has a default per algorithm."""

Logprobs = list[TokenLogprobs | None]
"""Log-probabilities of a block's tokens; None at positions that have none."""
_DECODER: Final = msgspec.msgpack.Decoder(type=analyzed(Logprobs))


class Phase(IntEnum):
    """Progress of a slot's block."""

    RUNNING = 0
    FINISHED = 1
    """The block is done, but the KV cache lacks its final tokens."""
    COMMITTED = 2
    """The block is done, and the KV cache holds its final tokens."""
    ENDED = 3
    """The block is done, and its request has ended."""


class SlotBlock(NamedTuple):
    """A slot's block before or after a round ahead."""

    start: int
    """First position of the block."""
    num_fixed: int
    """Number of tokens at the beginning of the block that the request already had."""
    rounds: int
    """Number of completed rounds of the block."""
    phase: Phase
    state: Sequence[int]
    """State of an editing algorithm, two numbers."""
    ids: Sequence[int]
    """Token ids of the block's positions."""
    undecided: Sequence[int]
    """1 for positions without a token, otherwise 0."""


class BlockTable:
    """Tokens, undecided positions, round and algorithm state of each slot's running block.

    A block becomes its slot's running block when a row of the request first ends with it. It stays
    in the table until the next block replaces it or another request gets the slot.

    Args:
        num_slots: number of slots.
        block_size: positions per block.
        mask_token_id: token at undecided positions.
        edit_token_ids: tokens for deletion and insertion; None if the model has none.
        algorithm: default algorithm.
        threshold: default threshold for requests of that algorithm; None for the algorithm's
            default.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        block_size: int,
        mask_token_id: int,
        edit_token_ids: tuple[int, int] | None,
        algorithm: DllmAlgorithm,
        threshold: float | None,
    ) -> None:
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.special: SpecialTokens | None = None
        """Special tokens of a model that deletes and inserts tokens; otherwise None."""
        if edit_token_ids is not None:
            self.special = SpecialTokens(mask_token_id, *edit_token_ids)
        self._algorithms = {name: kind() for name, kind in ALGORITHMS.items()}
        self._default_algorithm = algorithm
        self._default_thresholds = {name: a.default_threshold for name, a in ALGORITHMS.items()}
        if threshold is not None:
            self._default_thresholds[algorithm] = threshold
        initial = {
            name: a.init_step_state(block_size) or () for name, a in self._algorithms.items()
        }
        self._initial_states = initial
        self._state_size = max(len(state) for state in initial.values())
        shape = (num_slots, block_size)
        self.ids = np.full(shape, mask_token_id, dtype=np.int32)
        self.undecided = np.zeros(shape, dtype=np.bool_)
        self.fixed = np.zeros(shape, dtype=np.bool_)
        self.states = np.zeros((num_slots, self._state_size), dtype=np.int32)
        self.histories: list[list[IntArray]] = [[] for _ in range(num_slots)]
        """Arrays [2, B] that the algorithm recorded in the rounds of each slot's block."""
        self.rounds = np.zeros(num_slots, dtype=np.int64)
        """Number of completed rounds of each slot's block."""
        self.starts = np.full(num_slots, -1, dtype=np.int64)
        """First position of each slot's block; -1 before the request's first block."""
        self.proposed = np.zeros(shape, dtype=np.int32)
        """Tokens proposed by the last round under a grammar, for `accept`."""
        self.streams_drafts = np.zeros(num_slots, dtype=np.bool_)
        """Whether the running block is sent to the client after every round."""
        self.logprobs: list[Logprobs | None] = [None] * num_slots
        """Log-probabilities of each slot's block, from the rounds that decided its tokens; None for
        a request that does not return any."""
        self._is_done = np.zeros(num_slots, dtype=np.bool_)
        """Whether the slot's block is done."""
        self._is_committed = np.zeros(num_slots, dtype=np.bool_)
        """Whether the KV cache already contains the final tokens of a finished block."""
        self._has_ended = np.zeros(num_slots, dtype=np.bool_)
        """Whether the slot's block is done and has ended its request."""
        self._fresh = np.zeros(num_slots, dtype=np.bool_)
        """Whether the slot's block is new in `ids` and not yet in the device's token pool."""
        self._names: list[DllmAlgorithm] = [algorithm] * num_slots
        self._admits: list[BlockAdmit | None] = [None] * num_slots
        self._known = np.zeros(num_slots, dtype=np.int64)
        self._tails: list[IntArray] = [np.zeros(0, dtype=np.int32)] * num_slots
        self._threshold = np.zeros(num_slots, dtype=np.float32)
        self._steps = np.ones(num_slots, dtype=np.int32)
        self._entropy_bound = np.zeros(num_slots, dtype=np.float32)
        self._edit_threshold = np.zeros(num_slots, dtype=np.float32)
        self._max_post_edit_steps = np.zeros(num_slots, dtype=np.int32)
        self._penalty = np.zeros(num_slots, dtype=np.float32)

    def admit(self, admit: Admit) -> None:
        """Sets a slot up for a request; one that was preempted continues with its running block."""
        assert admit.block is not None, "a request of a block-diffusion model has a BlockAdmit"
        slot, block = admit.slot, admit.block
        tokens = np.frombuffer(admit.token_ids, dtype="<i4")
        self._admits[slot] = block
        self._known[slot] = len(tokens)
        self._tails[slot] = tokens[len(tokens) // self.block_size * self.block_size :]
        self._set_params(slot, block.params or DiffusionParams())
        params = admit.logits_params
        returns_logprobs = params is not None and params.num_logprobs >= 0
        self.logprobs[slot] = [None] * self.block_size if returns_logprobs else None
        self.starts[slot] = -1
        self._is_done[slot] = self._has_ended[slot] = False
        if block.state:
            self._restore(slot, block.state, tokens)

    def accept(self, slot: int, end: int) -> None:
        """Sets the undecided positions before `end` to the proposed tokens."""
        positions = self.starts[slot] + np.arange(self.block_size)
        taken = self.undecided[slot] & (positions < end)
        self.ids[slot, taken] = self.proposed[slot, taken]
        self.undecided[slot, taken] = False

    def enter(self, slot: int, start: int) -> bool:
        """Makes the block at `start` the slot's running block, if it is not already.

        Returns:
            Whether the block's tokens must be written to the device.
        """
        if self.starts[slot] != start:
            assert start == self._known[slot] // self.block_size * self.block_size or (
                start > self._known[slot]
            ), "a block that is known already"
            positions = start + np.arange(self.block_size)
            self._enter(slot, start)
            self.fixed[slot] = positions < self._known[slot]
            self.undecided[slot] = ~self.fixed[slot]
            self.ids[slot] = self.mask_token_id
            if self.fixed[slot].any():
                self.ids[slot, : len(self._tails[slot])] = self._tails[slot]
            self.rounds[slot] = 0
            self.histories[slot] = []
            if self.logprobs[slot] is not None:
                self.logprobs[slot] = [None] * self.block_size
            self.states[slot, :] = 0
            initial = self._initial_states[self._names[slot]]
            self.states[slot, : len(initial)] = initial
        fresh = bool(self._fresh[slot])
        self._fresh[slot] = False
        return fresh

    def finish(self, slot: int, *, is_committed: bool) -> None:
        """Records that the slot's block is done, and whether the KV cache has its final tokens."""
        self._is_done[slot] = True
        self._is_committed[slot] = is_committed
        self._has_ended[slot] = self.finished_tokens(slot) is not None

    def span(self, slot: int) -> tuple[int, int] | None:
        """Positions [start, end) that the slot's next forward pass computes; None if its request
        has ended.

        This is the running block or, if that is done, the next block, preceded by the done block if
        its final tokens are not in the KV cache.
        """
        if self._has_ended[slot]:
            return None
        start, size = int(self.starts[slot]), self.block_size
        if not self._is_done[slot]:
            return start, start + size
        return start + size * int(self._is_committed[slot]), start + 2 * size

    def get(self, slot: int) -> SlotBlock:
        """The slot's running block."""
        phase = Phase.RUNNING
        if self._is_done[slot]:
            phase = Phase.COMMITTED if self._is_committed[slot] else Phase.FINISHED
        return SlotBlock(
            start=int(self.starts[slot]),
            num_fixed=self.num_fixed(slot),
            rounds=int(self.rounds[slot]),
            phase=Phase.ENDED if self._has_ended[slot] else phase,
            state=self.states[slot, :2].tolist(),
            ids=self.ids[slot].tolist(),
            undecided=self.undecided[slot].tolist(),
        )

    def put(self, slot: int, block: SlotBlock) -> None:
        """Sets the slot's running block, whose tokens are on the device already."""
        self.starts[slot], self.rounds[slot] = block.start, block.rounds
        self.fixed[slot] = np.arange(self.block_size) < block.num_fixed
        self.states[slot, :2] = block.state
        self.ids[slot], self.undecided[slot] = block.ids, block.undecided
        self._fresh[slot] = False
        self._is_done[slot] = block.phase != Phase.RUNNING
        self._is_committed[slot] = block.phase == Phase.COMMITTED
        self._has_ended[slot] = block.phase == Phase.ENDED

    def limits(self, slots: Sequence[int]) -> tuple[npt.NDArray[np.int64], IntArray]:
        """Lengths [N] at which the requests of `slots` end, and their end tokens [N, E], padded
        with -1."""
        admits = [admit for slot in slots if (admit := self._admits[slot]) is not None]
        assert len(admits) == len(slots), "a slot without a request"
        most = max(1, *(len(admit.end_token_ids) for admit in admits))
        ends = np.full((len(slots), most), -1, dtype=np.int32)
        for row, admit in zip(ends, admits, strict=True):
            row[: len(admit.end_token_ids)] = admit.end_token_ids
        return np.array([admit.limit for admit in admits], dtype=np.int64), ends

    def algorithm_name(self, slot: int) -> DllmAlgorithm:
        """Name of the algorithm of the slot's request."""
        return self._names[slot]

    def algorithm(self, name: DllmAlgorithm) -> DiffusionAlgorithm:
        """The table's instance of the algorithm `name`."""
        return self._algorithms[name]

    def params(self, slots: Sequence[int]) -> BlockParams:
        """Algorithm parameters of the blocks of `slots`."""
        return BlockParams(
            threshold=self._threshold[slots, None],
            steps=self._steps[slots, None],
            entropy_bound=self._entropy_bound[slots, None],
            edit_threshold=self._edit_threshold[slots, None],
            max_post_edit_steps=self._max_post_edit_steps[slots, None],
            penalty=self._penalty[slots, None],
        )

    def new_ids(self, slot: int) -> IntArray:
        """Token ids that the slot's block adds to its request when it is done."""
        token_ids: IntArray = self.ids[slot][~self.fixed[slot]]
        return token_ids

    def set_logprobs(self, slot: int, column: int, logprobs: TokenLogprobs) -> None:
        """Sets the log-probabilities of the token at a position of the slot's block."""
        row = self.logprobs[slot]
        assert row is not None, "its request returns none"
        row[column] = logprobs

    def token_logprobs(self, slot: int, count: int) -> list[TokenLogprobs | None]:
        """Log-probabilities of the first `count` tokens that the slot's block adds; None for each
        token if the request does not return any."""
        logprobs = self.logprobs[slot]
        if logprobs is None:
            return [None] * count
        first = self.num_fixed(slot)
        return logprobs[first : first + count]

    def num_fixed(self, slot: int) -> int:
        """Number of tokens at the beginning of the slot's block that the request already had."""
        return int(self.fixed[slot].sum())

    def draft(self, slot: int) -> list[int]:
        """Tokens of the slot's block so far, without those of the prompt; -1 if undecided."""
        shown = np.where(self.undecided[slot], -1, self.ids[slot])
        token_ids: list[int] = shown[~self.fixed[slot]].tolist()
        return token_ids

    def finished_tokens(self, slot: int) -> list[int] | None:
        """Tokens that the slot's block adds if its request is certain to end within it, otherwise
        None.

        That is the case if all positions up to an EOS or stop token, or up to the length limit, are
        decided.
        """
        admit = self._admits[slot]
        assert admit is not None
        undecided = self.undecided[slot]
        num_decided = int(undecided.argmax()) if undecided.any() else self.block_size
        num_fixed = self.num_fixed(slot)
        decided = self.ids[slot, num_fixed:num_decided].tolist()
        for index, token_id in enumerate(decided):
            if token_id in admit.end_token_ids:
                return list(decided[: index + 1])
        num_left = admit.limit - int(self.starts[slot]) - num_fixed
        return list(decided[:num_left]) if len(decided) >= num_left else None

    def save(self, slot: int) -> bytes:
        """The slot's running block as bytes, from which `admit` restores it."""
        history = self.histories[slot]
        header = np.array([self.starts[slot], self.rounds[slot], len(history)], dtype="<i4")
        parts = (header, self.undecided[slot], self.ids[slot], self.states[slot], *history)
        logprobs = self.logprobs[slot]
        packed = b"" if logprobs is None else msgspec.msgpack.encode(logprobs)
        return b"".join(part.astype("<i4").tobytes() for part in parts) + packed

    def _restore(self, slot: int, state: bytes, tokens: IntArray) -> None:
        size, num_rounds = self.block_size, int(np.frombuffer(state, dtype="<i4", count=3)[2])
        num_bytes = 4 * (3 + 2 * size + self._state_size + 2 * size * num_rounds)
        values = np.frombuffer(state[:num_bytes], dtype="<i4").astype(np.int32)
        if self.logprobs[slot] is not None:
            self.logprobs[slot] = _DECODER.decode(state[num_bytes:])
        self._enter(slot, int(values[0]))
        self.rounds[slot] = values[1]
        self.undecided[slot], self.ids[slot], self.states[slot], history = np.split(
            values[3:], np.cumsum((size, size, self._state_size))
        )
        self.histories[slot] = list(history.reshape(num_rounds, 2, size))
        known = tokens[self.starts[slot] :][:size]
        self.fixed[slot] = np.arange(size) < len(known)
        # Under a grammar, tokens proposed in the last round may have been accepted in the meantime.
        self.ids[slot, : len(known)] = known
        self.undecided[slot, : len(known)] = False

    def _enter(self, slot: int, start: int) -> None:
        self.starts[slot] = start
        self._fresh[slot] = True
        self._is_done[slot] = self._has_ended[slot] = False

    def _set_params(self, slot: int, params: DiffusionParams) -> None:
        name = params.algorithm or self._default_algorithm
        self._names[slot] = name
        self.streams_drafts[slot] = params.stream_drafts
        self._threshold[slot] = _or(params.threshold, self._default_thresholds[name])
        self._steps[slot] = _or(params.steps, self.block_size)
        self._entropy_bound[slot] = _or(params.entropy_bound, _ENTROPY_BOUND)
        self._edit_threshold[slot] = _or(params.edit_threshold, _EDIT_THRESHOLD)
        self._penalty[slot] = _or(params.penalty, _PENALTY)
        self._max_post_edit_steps[slot] = _or(params.max_post_edit_steps, _MAX_POST_EDIT_STEPS)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
