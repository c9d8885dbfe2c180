"""Groups of layers, and the sizes of their pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from worker.config import EngineConfig
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec, group_layers
from worker.plan.plan import PageCopies, Plan
from worker.protocol.page_groups import MIN_SNAPSHOTS, UNBOUNDED, PageGroups
from worker.rank.host_pages import create_host_pages
from worker.rank.kv_cache import allocate_kv_caches, allocate_planes, kv_caches
from worker.rank.preflight import check_windows

FULL = KVCacheSpec(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
WINDOW = replace(FULL, window=100)
STATE = StateSpec(
    planes=(StatePlane((3, 80), torch.bfloat16), StatePlane((4, 32, 16), torch.float32))
)


def test_equal_layers_are_one_group() -> None:
    layout = group_layers([FULL] * 4)
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3)]
    assert layout.page_groups == PageGroups()
    # Keys and values, of 16 tokens, 2 heads of 64 numbers of 2 bytes, in 4 layers.
    assert layout.page_bytes(16) == 2 * 16 * 2 * 64 * 2 * 4
    assert group_layers([WINDOW] * 4).page_groups == PageGroups(0, 1, 100)


def test_kinds_of_layers_are_groups_of_equal_size() -> None:
    layout = group_layers([FULL, WINDOW, WINDOW, FULL, WINDOW, WINDOW, WINDOW])
    assert [(group.window, group.layers) for group in layout.groups] == [
        (0, (0, 3)),
        (100, (1, 2)),
        (100, (4, 5)),
        (100, (6,)),
    ]
    assert layout.page_groups == PageGroups(1, 3, 100)
    assert layout.page_bytes(16) == 2 * FULL.page_bytes(16)
    nearly_even = group_layers([FULL] * 5 + [WINDOW] * 6)
    assert nearly_even.page_groups == PageGroups(1, 1, 100)
    assert nearly_even.group_size == 6


def test_pages_are_given_back_behind_the_widest_window() -> None:
    layout = group_layers([FULL, WINDOW, replace(FULL, window=30)])
    assert [group.window for group in layout.groups] == [0, 30, 100]
    assert layout.page_groups == PageGroups(1, 2, 100)


def test_layers_that_keep_unlike_things_are_refused() -> None:
    with pytest.raises(ValueError, match=r"page sizes of layer 1 .* are not multiples"):
        group_layers([FULL, replace(FULL, value_dim=8)])


def test_values_have_a_plane_of_their_width() -> None:
    """In host memory, too, where a slot has the planes side by side."""
    wide = KVCacheSpec(num_kv_heads=2, head_dim=24, dtype=torch.bfloat16, own_value_dim=16)
    own = replace(wide, num_kv_heads=1, window=9)
    layout = group_layers([wide, own, own])
    assert layout.page_bytes(4) == wide.page_bytes(4) == 4 * 2 * (24 + 16) * 2
    planes = allocate_planes(3, 4, layout, torch.device("cpu"))[0]
    caches = kv_caches([planes], 4, layout)
    for layer, (heads, num_pages) in enumerate([(2, 3), (1, 6), (1, 5)]):
        assert caches[layer].k.shape == (num_pages, 4, heads, 24)
        assert caches[layer].v.shape == (num_pages, 4, heads, 16)
    for plane in planes:
        plane.copy_(torch.randn(plane.shape))
    before = [plane.clone() for plane in planes]
    host = create_host_pages(2, planes, None)
    assert host is not None
    copies = PageCopies(pages=[2, 1], slots=[0, 1])
    host.copy(Plan(seq=1, admits=[], page_writes=[], rows=[], stores=copies))
    for plane in planes:
        plane.zero_()
    host.copy(Plan(seq=2, admits=[], page_writes=[], rows=[], loads=copies))
    for plane, expected in zip(planes, before, strict=True):
        assert torch.equal(plane[1:], expected[1:])
    with pytest.raises(ValueError, match="are not multiples of each other"):
        group_layers([wide, replace(own, own_value_dim=0)])


def test_layers_that_keep_less_share_pages() -> None:
    wide = KVCacheSpec(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    layout = group_layers([WINDOW, WINDOW, wide, WINDOW, wide, WINDOW, wide])
    assert [(group.window, group.layers, group.layers_per_page) for group in layout.groups] == [
        (0, (2, 4, 6), 2),
        (100, (0, 1), 1),
        (100, (3, 5), 1),
    ]
    assert layout.page_groups == PageGroups(1, 2, 100)
    assert layout.page_bytes(16) == 2 * WINDOW.page_bytes(16)
    caches = allocate_kv_caches(3, 4, layout, torch.device("cpu"))
    for layer, num_pages in {2: 6, 4: 5, 6: 6}.items():
        assert [plane.shape for plane in caches[layer].planes] == [(num_pages, 4, 1, 64)] * 2
        caches[layer].k[2 * 2] = layer
        caches[layer].v[2 * 2] = -layer
    first, second = caches[0].k[2].flatten().view(2, -1), caches[1].k[2].flatten().view(2, -1)
    assert first.unique(dim=1).flatten().tolist() == [2, 4], "page 2 is shared by halves"
    assert second.unique(dim=1).flatten().tolist() == [6, 0]
    assert caches[0].v[2].sum() == -(2 + 4) * 4 * 64
    assert all((caches[layer].k[:2] == 0).all() for layer in (0, 1))


@pytest.mark.parametrize("method", ["draft", "eagle3"])
def test_draft_models_and_eagle_heads_need_pages_of_all_positions(method: str) -> None:
    narrow = replace(FULL, num_kv_heads=1)
    refusal = f"--speculative-method {method} is not supported"
    config = EngineConfig.of(model="any", speculative_method=method, speculative_model="any")

    def check(*specs: KVCacheSpec) -> None:
        groups = group_layers(specs).groups
        check_windows(
            *(config, [group.window for group in groups]),
            num_groups=len(groups),
            layers_per_page=groups[0].layers_per_page,
        )

    check(FULL, FULL)
    check(FULL, narrow)
    check(WINDOW, FULL)
    with pytest.raises(ValueError, match=f"{refusal}.* in all layers .* --max-model-len 100$"):
        check(WINDOW)
    with pytest.raises(ValueError, match=f"{refusal}.* have smaller pages than others: remove it$"):
        check(WINDOW, narrow)


def test_a_head_beside_the_model_has_planes_of_its_own() -> None:
    """Their pages are those of the first group, and copied to the host with them."""
    latents = replace(FULL, num_kv_heads=1, head_dim=24, value_dim=16)
    layout = group_layers([latents] * 2).with_beside(2, FULL)
    assert layout.page_groups == PageGroups()
    assert layout.page_bytes(4) == 2 * latents.page_bytes(4) + FULL.page_bytes(4)
    planes = allocate_planes(3, 4, layout, torch.device("cpu"))
    caches = kv_caches(planes, 4, layout)
    assert list(caches) == [0, 1, 2]
    assert caches[2].k.shape == caches[2].v.shape == (3, 4, 2, 64)
    assert [len(tensors) for tensors in planes] == [1, 1, 2]
    assert caches[2].k.data_ptr() == planes[2][0].data_ptr()


def test_a_state_takes_as_much_memory_as_some_pages() -> None:
    layout = group_layers([None, FULL, FULL, None], [STATE, STATE, None, STATE])
    assert [group.layers for group in layout.groups] == [(1, 2)]
    assert list(layout.states) == [0, 1, 3]
    assert layout.state_bytes == 3 * (3 * 80 * 2 + 4 * 32 * 16 * 4)
    assert layout.snapshot_pages(16) == -(-layout.state_bytes // layout.page_bytes(16)) == 2
    assert group_layers([FULL]).snapshot_pages(16) == 0
    groups = PageGroups(snapshot_pages=4)
    assert groups.num_snapshots(401) == 100
    assert groups.num_snapshots(7) == MIN_SNAPSHOTS
    assert PageGroups().num_snapshots(400) == 0


@pytest.mark.parametrize("others", [[], [WINDOW], [FULL, WINDOW]], ids=len)
def test_states_need_layers_that_see_everything(others: list[KVCacheSpec]) -> None:
    with pytest.raises(ValueError, match="require full-attention layers"):
        group_layers([None, *others], [STATE])


def test_a_window_bounds_the_pages_of_a_request() -> None:
    groups = PageGroups(num_full=1, num_window=2, window=100)
    most = groups.max_window_blocks(16, 64)
    assert most == 7 + 4 + 1
    assert groups.num_pages(64, 16, 64) == 3 * 4
    assert groups.num_pages(16000, 16, 64) == 1000 + 2 * most
    for num_pages in (3, 30, 36, 37, 1000 + 2 * most):
        longest = groups.max_tokens(num_pages, 16, 64)
        assert (
            groups.num_pages(longest, 16, 64) <= num_pages < groups.num_pages(longest + 1, 16, 64)
        )
    only_windows = PageGroups(num_full=0, num_window=1, window=100)
    assert only_windows.max_tokens(most, 16, 64) == UNBOUNDED
    assert only_windows.max_tokens(most - 1, 16, 64) == 16 * (most - 1)


def test_the_first_block_is_the_one_with_the_first_position_in_sight() -> None:
    groups = PageGroups(num_full=1, num_window=1, window=5)
    # A query at 20 sees 16 to 20, one at 19 sees 15.
    assert [groups.first_block(position, 4) for position in (0, 4, 19, 20)] == [0, 0, 3, 4]
