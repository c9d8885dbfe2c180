"""Steps of a gated delta net, and its Triton kernels against the torch reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from kernels import registry
from kernels.gated_delta_rule import DeltaLayer, gated_delta_net
from kernels.states import PIECE, StateCache, StateRows
from worker.rank.state_replays import StateReplays


class Row(NamedTuple):
    """A row of a step."""

    slot: int
    start: int
    length: int
    stores: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of tokens of the row, after which its state is stored, and the target slot.
    """


def make_layer(
    *, key_heads: int = 1, ratio: int = 2, key: int = 16, value: int = 16, dtype: torch.dtype
) -> DeltaLayer:
    heads = key_heads * ratio
    return DeltaLayer(
        conv=0.5 * torch.randn(4, 2 * key_heads * key + heads * value).to(dtype),
        log_rate=torch.randn(heads),
        step_bias=torch.randn(heads),
        norm=1.0 + 0.1 * torch.randn(value).to(dtype),
        eps=1e-6,
        num_key_heads=key_heads,
        key_dim=key,
    )


def make_cache(layer: DeltaLayer, count: int, dtype: torch.dtype) -> StateCache:
    num_heads, value = len(layer.log_rate), len(layer.norm)
    return StateCache(
        planes=(
            torch.randn(count, len(layer.conv) - 1, layer.conv.shape[1]).to(dtype),
            torch.randn(count, num_heads, layer.key_dim, value),
        )
    )


def make_rows(
    rows: Sequence[Row],
    *,
    num_empty: int = 0,
    num_decodes: int | None = None,
    drafts: Collection[int] = (),
) -> StateRows:
    """Creates the rows of a step, followed by empty chunks. Rows of one token must come first.
    `drafts` are the slots of draft rows."""
    starts, owners, targets, first_pieces, token = [], [], [], [0], 0
    for number, row in enumerate(rows):
        stores = dict(row.stores)
        begun = 0
        for done in range(1, row.length + 1):
            if done in stores or done == row.length or done - begun == PIECE:
                starts.append(token + begun)
                owners.append(number)
                targets.append(stores.get(done, -1))
                begun = done
        token += row.length
        first_pieces.append(len(starts))
    if num_decodes is None:
        num_decodes = sum(row.length == 1 for row in rows)
    return StateRows(
        slots=torch.tensor([row.slot for row in rows]),
        starts=torch.tensor([row.start for row in rows]),
        piece_starts=torch.tensor(starts + (num_empty + 1) * [token]),
        piece_rows=torch.tensor(owners + num_empty * [0]),
        piece_targets=torch.tensor(targets + num_empty * [-1]),
        row_pieces=torch.tensor(first_pieces),
        num_decodes=num_decodes,
        longest=max(row.length for row in rows),
        kept=torch.tensor([-1 if row.slot in drafts else row.slot for row in rows])
        if drafts
        else None,
    )


def run_step(
    step: tuple[torch.Tensor, DeltaLayer, StateCache, StateRows], *, by_position: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs a step on a copy of its cache; returns the outputs and the states after the step."""
    x, layer, cache, rows = step
    own = StateCache(planes=tuple(plane.clone() for plane in cache.planes))
    out = gated_delta_net(x, layer, own, rows, by_position=by_position)
    return out, own.conv, own.recurrent


Moved = TypeVar("Moved", DeltaLayer, StateCache, StateRows)


def _moved(device: str, one: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(_moved(device, part) for part in one)
    return one.to(device) if isinstance(one, torch.Tensor) else one


def to_device(device: str, value: Moved) -> Moved:
    """A copy of the value whose tensors are on a device."""
    names = value._fields if isinstance(value, DeltaLayer) else list(value.__dataclass_fields__)
    fields: dict[str, Any] = {name: getattr(value, name) for name in names}
    moved = {name: _moved(device, one) for name, one in fields.items()}
    kind: Any = type(value)
    made: Moved = kind(**moved)
    return made


SHORT_ROWS = (Row(0, 5, 1), Row(1, 0, 1), Row(2, 9, 1, ((1, 9),)))
"""Rows of one token: one continues a state, one starts a state, and one also stores its state."""
ROWS = (
    *SHORT_ROWS,
    Row(3, 0, 0),
    Row(4, 0, 2, ((2, 10),)),
    Row(5, 9, 5, ((2, 11), (3, 12))),
    Row(6, 0, 70, ((66, 13),)),
    Row(7, 3, 17),
)
"""SHORT_ROWS, and rows with no token, with several tokens, and with so many that they are computed
in chunks."""
DRAFT_ROW = Row(8, 4, 3)
WITH_DRAFTS = make_rows((*ROWS[1:6], DRAFT_ROW), drafts=[DRAFT_ROW.slot])
"""Rows of few tokens, including a draft row, which leaves its state unchanged."""


def make_step(
    rows: StateRows, device: str, dtype: torch.dtype, *, value: int = 16
) -> tuple[torch.Tensor, DeltaLayer, StateCache, StateRows]:
    """Creates a step in which half of the tokens are equal, so that they have equal keys."""
    layer = make_layer(value=value, dtype=dtype)
    cache = make_cache(layer, 14, dtype)
    x = torch.randn(int(rows.piece_starts[-1]), sum(layer.widths)).to(device, dtype)
    x[len(x) // 2 :] = x[-1]
    return x, to_device(device, layer), to_device(device, cache), to_device(device, rows)


def delta_net_case(device: str, dtype: torch.dtype) -> None:
    """Checks decodes with dimensions that are not powers of two, then rows of all kinds, as in a
    graph, with step sizes up to 2."""
    steps = [
        (make_rows(SHORT_ROWS, drafts=[SHORT_ROWS[0].slot]), 24, False, 1.0),
        (make_rows(ROWS, num_empty=2, num_decodes=0), 24, False, 2.0),
        (WITH_DRAFTS, 16, True, 1.0),
    ]
    for rows, value, by_position, share_scale in steps:
        x, layer, cache, own = make_step(rows, device, dtype, value=value)
        step = (x, layer._replace(share_scale=share_scale), cache, own)
        with registry.using("torch"):
            expected = run_step(step, by_position=by_position)
        with registry.using("triton"):
            found = run_step(step, by_position=by_position)
        tolerance = 2e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def delta_invariance_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a row's outputs and state are bitwise equal alone and in two parts."""
    whole = (Row(0, 0, 1), Row(1, 4, 1), Row(2, 0, 23), Row(3, 7, 2))
    x, layer, cache, rows = make_step(make_rows(whole), device, dtype)
    with registry.using("triton"):
        expected = run_step((x, layer, cache, rows), by_position=True)
        for one, first in ((whole[1], 1), (whole[3], 25)):
            own = to_device(device, make_rows([one]))
            alone = x[first : first + one.length].contiguous()
            out, conv, state = run_step((alone, layer, cache, own), by_position=True)
            assert torch.equal(out, expected[0][first : first + one.length])
            assert torch.equal(conv[one.slot], expected[1][one.slot])
            assert torch.equal(state[one.slot], expected[2][one.slot])
        outputs = []
        for part, tokens in ((Row(2, 0, 2), x[2:4]), (Row(2, 2, 21), x[4:25])):
            own = to_device(device, make_rows([part]))
            out, conv, state = run_step((tokens.contiguous(), layer, cache, own), by_position=True)
            cache = StateCache(planes=(conv, state))
            outputs.append(out)
    assert torch.equal(torch.cat(outputs), expected[0][2:25])
    assert torch.equal(conv[2], expected[1][2])
    assert torch.equal(state[2], expected[2][2])


def delta_replay_case(device: str, dtype: torch.dtype) -> None:
    """Checks accepted drafts, whose number is only known on the device: of a row that also stores
    its state, of a row that starts where its ring of inputs does, and of a row without drafts."""
    layer = make_layer(dtype=dtype)
    cache, num_tokens = make_cache(layer, 14, dtype), 4
    inputs = torch.randn(8 * num_tokens, sum(layer.widths)).to(device, dtype)
    layer, cache = to_device(device, layer), to_device(device, cache)
    slots, starts, positions, targets = torch.tensor(
        [[2, 5, 1], [9, 11, 30], [8, -1, -1], [12, -1, -1]], device=device
    )
    found: dict[Literal["torch", "triton"], tuple[torch.Tensor, ...]] = {}
    for backend in ("torch", "triton"):
        with registry.using(backend):
            replays = StateReplays(8, num_tokens, torch.device(device))
            replays._positions[slots[:2]] = torch.tensor([6, 8], device=device)
            rows, cells = replays._rows(slots, starts, positions, targets)
            assert len(cells) == (12 if backend == "triton" else 6)
            assert cells[:6].tolist() == [10, 11, 8, 20, 21, 22]
            _, *states = run_step((inputs[cells], layer, cache, rows))
            found[backend] = tuple(states)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found["triton"], found["torch"], rtol=tolerance, atol=tolerance)
    changed = (found["torch"][1] != cache.recurrent).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [2, 5, 12]


DELTA_CASES = [delta_net_case, delta_invariance_case, delta_replay_case]
