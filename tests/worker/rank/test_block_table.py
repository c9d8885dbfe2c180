"""The running block of a preempted request, as bytes and back."""

from __future__ import annotations

import msgspec
import numpy as np

from worker.plan.plan import Admit, BlockAdmit, LogitsParams
from worker.protocol.messages import TokenLogprobs
from worker.rank.diffusion.table import BlockTable


def make_table() -> BlockTable:
    return BlockTable(
        num_slots=2,
        block_size=4,
        mask_token_id=9,
        edit_token_ids=(8, 7),
        algorithm="JointThresholdInDel",
        threshold=None,
    )


def test_all_of_a_block_is_restored() -> None:
    table, other, tokens = make_table(), make_table(), np.arange(6, dtype="<i4").tobytes()
    admit = Admit(
        *(0, tokens, 0.0, 0, 1.0, 0.0, 1),
        logits_params=LogitsParams(num_prompt=6, num_logprobs=0),
        block=BlockAdmit(None, [], 16),
    )
    table.admit(admit)
    table.enter(0, 4)
    assert table.ids[0].tolist() == [4, 5, 9, 9]
    table.ids[0, 2], table.undecided[0, 2], table.rounds[0] = 3, False, 5
    table.set_logprobs(0, 2, TokenLogprobs.pack([3], [-0.5], 1))
    table.states[0, :4] = 2, 5, 0, 1
    table.histories[0] += [np.arange(8, dtype=np.int32).reshape(2, 4) + shift for shift in (0, 8)]
    state = table.save(0)
    other.admit(msgspec.structs.replace(admit, slot=1, block=BlockAdmit(None, [], 16, state)))
    for name in ("ids", "undecided", "fixed", "states", "rounds", "starts"):
        assert np.array_equal(getattr(other, name)[1], getattr(table, name)[0]), name
    assert np.array_equal(other.histories[1], table.histories[0])
    assert other.logprobs[1] == table.logprobs[0]
    assert other.save(1) == state
