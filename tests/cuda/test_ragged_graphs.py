"""Steps with prompts and drafts replay graphs by number of tokens: each is a replay plus sampling;
sabotages are detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.cuda.clocks import Clocks, Graph
from tests.support.cuda.serving import on_cpu, on_cuda, params, prompts
from tests.support.effort import IS_LONG
from worker.protocol.sampling import SamplingParams
from worker.rank import batch
from worker.rank.runner import ModelRunner
from worker.rank.steps import ForwardStep

pytestmark = pytest.mark.randomized  # with more requests
SIZES = (1, 2, 4, 16, 64)
"""The last size fits every step."""
MOST_LAUNCHES = 12
"""Launches of a greedy step: copies of its rows to the device and into the graph's buffer, new
table entries, a replay, the logits and the sample of the last tokens, which go to the token pool
and to the host."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return str(folder)


def note_launches(patch: pytest.MonkeyPatch) -> list[int]:
    """Collects the launches of each step with longer rows; a replay counts as one."""
    found: list[int] = []
    clocks: list[Clocks] = []
    init, replay = Graph.__init__, Graph.replay
    forward, sample = ModelRunner.forward, ModelRunner.sample

    def made(graph: Graph, own: Clocks) -> None:
        init(graph, own)
        clocks.append(own)

    def replayed(graph: Graph) -> None:
        before = graph.clocks.num_launches
        replay(graph)
        graph.clocks.num_launches = before + 1

    def forwarded(runner: ModelRunner, plan: Any) -> ForwardStep:
        before = clocks[-1].num_launches
        step = forward(runner, plan)
        if step.batch is not None and (step.batch.rows[:, 2] > 1).any():
            found.append(clocks[-1].num_launches - before)
        return step

    def sampled(runner: ModelRunner, step: ForwardStep, *masks: bytes) -> Any:
        before = clocks[-1].num_launches
        result = sample(runner, step, *masks)
        if step.batch is not None and (step.batch.rows[:, 2] > 1).any():
            found[-1] += clocks[-1].num_launches - before
        return result

    patch.setattr(Graph, "__init__", made)
    patch.setattr(Graph, "replay", replayed)
    patch.setattr(ModelRunner, "forward", forwarded)
    patch.setattr(ModelRunner, "sample", sampled)
    return found


GREEDY = SamplingParams(temperature=0.0, max_tokens=6 if IS_LONG else 4, ignore_eos=True)
FEW_SIZES = (4, 64)
"""Sizes for decodes and for prompts."""


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(SIZES, id="graphs"),
        pytest.param((1, 2, 4), id="too small", marks=pytest.mark.long),
    ],
)
def test_a_step_with_prompts_is_a_replay_and_a_draw(folder: str, sizes: tuple[int, ...]) -> None:
    given = prompts(8 if IS_LONG else 6)
    with pytest.MonkeyPatch.context() as patch:
        counts = note_launches(patch)
        served = on_cuda(folder, given, GREEDY, cudagraph_capture_sizes=sizes)
    assert (served.findings, served.waits) == ([], [])
    assert served.tokens == on_cpu(folder, given, GREEDY)
    assert len(counts) > 2
    assert (max(counts) <= MOST_LAUNCHES) == (sizes is SIZES)


def repeated() -> list[list[int]]:
    """Prompts, then others with the same prefixes, which are cached by then; half of them in `make
    test`."""
    given = prompts(8 if IS_LONG else 4)
    return [*given, *([*prompt[:40], 7, 8, 9] for prompt in given)]


def assert_same_tokens(folder: str, **options: Any) -> None:
    """Compares requests with filters, penalties, and log-probabilities of outputs and prompts."""
    given = repeated()
    asked = params(len(given), 12 if IS_LONG else 6)
    served = on_cuda(folder, given, asked, cudagraph_capture_sizes=SIZES, **options)
    assert served.findings == []
    assert served.tokens == on_cpu(folder, given, asked)


MIXES: dict[str, dict[str, Any]] = {
    "cached": {},
    "chunks": {"max_num_batched_tokens": 16},
    "scarce": {"kv_cache_tokens": 96},
    "ranks": {"num_ranks": 2},
}


@pytest.mark.parametrize(
    "name",
    [one if one == "chunks" else pytest.param(one, marks=pytest.mark.long) for one in MIXES],
)
def test_no_step_draws_anything_else_and_nothing_races(folder: str, name: str) -> None:
    assert_same_tokens(folder, **MIXES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt-oss", "gemma2", "qwen3-moe"])
def test_models_with_other_layers_draw_nothing_else(name: str, tmp_path: Path) -> None:
    """Models with windows, sinks, caps and experts."""
    write_specimen(name, tmp_path)
    given = [[token % VOCAB_SIZE for token in prompt] for prompt in repeated()]
    served = on_cuda(str(tmp_path), given, GREEDY, cudagraph_capture_sizes=SIZES)
    assert served.findings == []
    assert served.tokens == on_cpu(str(tmp_path), given, GREEDY)


def move_buffer(runner: ModelRunner) -> None:
    graphs = runner._graphs
    assert graphs is not None
    assert graphs._hidden is not None
    graphs._hidden = graphs._hidden.clone()


def pad_into_real_pages(runner: ModelRunner) -> None:
    tables = runner._tables
    with torch.inference_mode():
        tables.page_table[tables.dummy_slot].fill_(1)


@pytest.mark.parametrize(
    "meddle",
    [
        pytest.param(move_buffer, id="buffer"),
        pytest.param(pad_into_real_pages, id="pages", marks=pytest.mark.long),
    ],
)
def test_what_a_replay_may_not_touch_is_found(
    folder: str, meddle: Callable[[ModelRunner], None]
) -> None:
    given = prompts(3)
    served = on_cuda(folder, given, GREEDY, cudagraph_capture_sizes=FEW_SIZES, meddle=meddle)
    if meddle is move_buffer:
        assert any("gone" in finding for finding in served.findings), served.findings
    else:
        assert served.tokens != on_cpu(folder, given, GREEDY)


def test_lengths_that_the_host_reads_are_found(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_rows = batch._attention_rows

    def reading(of: Any, step: Any, tables: Any, query_start: torch.Tensor, spec: Any) -> Any:
        if of.num_tokens:
            query_start.tolist()
        return attention_rows(of, step, tables, query_start, spec)

    monkeypatch.setattr(batch, "_attention_rows", reading)
    served = on_cuda(folder, prompts(1), GREEDY, cudagraph_capture_sizes=FEW_SIZES)
    assert any("in a capture" in finding for finding in served.findings), served.findings
