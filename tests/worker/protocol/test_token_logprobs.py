"""Packed log-probabilities of a token."""

from __future__ import annotations

import math
import tracemalloc

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.serving.completion import LOGPROB_BYTES, LOGPROBS_BYTES
from worker.protocol.messages import TokenLogprobs

IDS = st.integers(0, 2**31 - 1)
VALUES = st.floats(max_value=0.0, allow_nan=False)


@given(st.lists(st.tuples(IDS, VALUES), min_size=1, max_size=21), st.integers(1, 2**20))
def test_packed_values_are_restored(pairs: list[tuple[int, float]], rank: int) -> None:
    token_ids, logprobs = [token for token, _ in pairs], [value for _, value in pairs]
    packed = TokenLogprobs.pack(token_ids, logprobs, rank)
    encoded = msgspec.msgpack.encode(packed)
    found = msgspec.msgpack.decode(encoded, type=TokenLogprobs)
    assert found == packed
    assert found.rank == rank
    assert found.token_ids == token_ids
    with np.errstate(over="ignore"):
        assert found.logprobs == np.array(logprobs, np.float32).tolist()


def test_beyond_float32_is_minus_infinity() -> None:
    found = TokenLogprobs.pack([1, 2], [-1e300, -math.inf], 1)
    assert found.logprobs == [-math.inf, -math.inf]


def test_packed_logprobs_have_the_size_that_gateways_assume() -> None:
    encoded = msgspec.msgpack.encode(
        [TokenLogprobs.pack(range(token, token + 21), [-0.5] * 21, 7) for token in range(1000)]
    )
    tracemalloc.start()
    try:
        found = msgspec.msgpack.decode(encoded, type=list[TokenLogprobs])
        per_token = tracemalloc.get_traced_memory()[0] / len(found)
    finally:
        tracemalloc.stop()
    reckoned = LOGPROBS_BYTES + 21 * LOGPROB_BYTES
    assert 0.5 * reckoned < per_token < 1.5 * reckoned
