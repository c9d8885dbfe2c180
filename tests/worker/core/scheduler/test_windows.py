"""Sliding windows: pages are given back while requests run, and when they end."""

from __future__ import annotations

import pytest

from tests.support.worker.fake_device import Harness, make_submit
from worker.core.request import Request
from worker.protocol.page_groups import PageGroups

FULL_AND_WINDOW = PageGroups(num_full=1, num_window=1, window=4096)
ONLY_WINDOWS = PageGroups(num_full=0, num_window=1, window=4096)
PAGE, CHUNK, LENGTH = 16, 1024, 32768


def window_pages_held(harness: Harness, request: Request) -> int:
    """Pages of a window group that are not available to others."""
    lease, blocks = request.lease, harness.scheduler.state.cache._blocks
    assert lease is not None
    assert blocks is not None
    return sum(block in blocks._users for block in blocks._window)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("groups", "depth"), [(FULL_AND_WINDOW, 0), (ONLY_WINDOWS, 1)])
def test_a_long_request_holds_a_window_and_a_step(
    groups: PageGroups, depth: int, caching: bool
) -> None:
    num_full = groups.num_full * LENGTH // PAGE
    # The window, a step, and partial pages at both ends.
    most = groups.window // PAGE + CHUNK // PAGE + 1
    harness = Harness(
        checked=False,
        num_pages=num_full + groups.num_window * most + 1,
        page_groups=groups,
        page_size=PAGE,
        max_num_batched_tokens=CHUNK,
        max_model_len=LENGTH,
        enable_prefix_caching=caching,
    )
    assert harness.config.max_total_tokens == LENGTH
    prompt = [3 + at % 45 for at in range(LENGTH - 100)]
    harness.submit(make_submit("long", prompt, max_tokens=100, ignore_eos=True))
    held = []
    while harness.step(depth):
        for request in harness.scheduler.state.running:
            held.append(window_pages_held(harness, request))
            harness.scheduler.check_invariants()
    assert max(held) <= most
    assert max(held) >= groups.window // PAGE
    assert len(harness.outcomes["long", 0].tokens) == 100
    assert harness.last is not None
    assert harness.last.load.num_preemptions == 0
    harness.check_drained()


def test_a_hit_needs_the_window_pages_at_its_end() -> None:
    groups = PageGroups(num_full=1, num_window=1, window=9)
    harness = Harness(page_groups=groups, num_pages=121, max_model_len=200, max_num_seqs=2)
    cache = harness.scheduler.state.cache
    blocks = cache._blocks
    assert blocks is not None
    prompt = [3 + at % 5 for at in range(60)]

    def run(name: str, tokens: list[int]) -> int:
        harness.submit(make_submit(name, tokens, max_tokens=1))
        harness.drain()
        return harness.finished(name).num_cached

    assert run("first", prompt) == 0
    # Pages behind the window are cached until others need them.
    assert run("middle", prompt[:30]) == 28
    assert run("end", [*prompt, 9, 9]) == 60
    blocks.reclaim(10**6, ends=False)
    assert run("end again", [*prompt, 8, 8]) == 60
    # A continuation of the middle hits as far as the second prompt ended; others miss.
    assert run("middle again", [*prompt[:30], 8, 8]) == 28
    assert run("elsewhere", [*prompt[:44], 9, 9]) == 28
    assert run("now here", [*prompt[:44], 7, 7]) == 44
    harness.check_drained()


def test_computed_again_window_pages_are_cached_again() -> None:
    groups = PageGroups(num_full=1, num_window=1, window=9)
    harness = Harness(page_groups=groups, num_pages=121, max_model_len=200, max_num_seqs=2)
    blocks = harness.scheduler.state.cache._blocks
    assert blocks is not None
    prompt = [3 + at % 5 for at in range(60)]
    for name, cached in (("first", 0), ("second", 56), ("third", 56)):
        harness.submit(make_submit(name, prompt, max_tokens=1))
        harness.drain()
        assert harness.finished(name).num_cached == cached
    blocks.reclaim(10**6, ends=False)
    blocks.reclaim(10**6, ends=True)
    for name, cached in (("fourth", 0), ("fifth", 56)):
        harness.submit(make_submit(name, prompt, max_tokens=1))
        harness.drain()
        assert harness.finished(name).num_cached == cached
    harness.check_drained()


def test_more_requests_fit_with_windows() -> None:
    """Four concurrent requests of 160 tokens, with memory for all positions of two."""
    groups = PageGroups(num_full=1, num_window=3, window=16)
    harness = Harness(
        page_groups=groups, num_pages=4 * 80 + 1, max_model_len=200, max_num_batched_tokens=16
    )
    for number in range(4):
        prompt = [3 + number + at % 5 for at in range(120)]
        harness.submit(make_submit(f"r{number}", prompt, max_tokens=40, ignore_eos=True))
    most = 0
    while harness.step(1):
        most = max(most, len(harness.scheduler.state.running))
    assert most == 4
    assert harness.last is not None
    assert harness.last.load.num_preemptions == 0
    for number in range(4):
        harness.finished(f"r{number}")
    harness.check_drained()
