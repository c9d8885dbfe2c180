"""Steps on static buffers, padded as for a captured graph, against unpadded steps.

Only the capture is omitted: a replay here calls the captured code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import registry
from kernels.attention import CapturableBackend
from tests.support.checkpoints.dense import FEW_HEADS, write_checkpoint
from tests.support.engines.decode_plans import (
    GRAPH_SIZES,
    OPTIONS,
    RAGGED_REPLAYS,
    REPLAYS,
    TOKEN_SIZES,
    assert_same,
    assert_same_state,
    noting_replays,
    run_plans,
    run_plans_ahead,
)
from tests.support.engines.plan_driver import make_runner
from tests.support.engines.race_detector import Detector
from worker.rank.graphs import StepGraphs
from worker.rank.streams import DeviceStreams


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3-windows", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("token_sizes", "replays"),
    [pytest.param((), REPLAYS, marks=pytest.mark.long), (TOKEN_SIZES, RAGGED_REPLAYS)],
    ids=["rows", "tokens"],
)
def test_padded_steps_on_static_buffers_draw_the_same(
    name: str,
    token_sizes: tuple[int, ...],
    replays: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(name, tmp_path, **FEW_HEADS)
    static = make_runner(str(tmp_path), **OPTIONS)
    with registry.using("torch"):  # kernels as eager steps run them have tests of their own
        own = make_runner(str(tmp_path), **OPTIONS)
        expected = run_plans(own)
    replayed: list[int] = []

    with torch.inference_mode():
        assert isinstance(static._attention, CapturableBackend)
        steps = (static.run_model, static.compute_logits, static._tables)
        static._graphs = StepGraphs(
            *(*steps, GRAPH_SIZES, noting_replays(replayed)),
            token_sizes=token_sizes,
            show_progress=False,
        )
    with Detector(monkeypatch), torch.inference_mode():
        # On streams, with every step launched before the results of the last one are taken.
        static._streams = DeviceStreams(torch.device("cpu"))
        results = run_plans_ahead(static)
    assert_same(results, expected)
    assert replayed == replays
    assert_same_state(static, own)
    assert bool((static._graphs._masks == -1).all())
