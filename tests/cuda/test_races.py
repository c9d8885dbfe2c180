"""No races on CUDA: whole engines on fake devices, and sabotages that must be detected. Tokens
equal the CPU's, and no step waits for the device unnecessarily."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.attention.triton_backend import TritonAttention
from kernels.mla_prefill import base as mla_prefill
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.sdar import write_sdar
from tests.support.cuda.clocks import Event, Lane
from tests.support.cuda.ranks import NcclGroup
from tests.support.cuda.serving import (
    DRAFTS,
    HOST,
    by_model,
    on_cpu,
    on_cuda,
    params,
    prompts,
)
from tests.support.effort import IS_LONG
from tests.support.engines.block_engine import BlockEngine
from worker.models.layers.context import KVCache
from worker.plan.plan import Plan
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.rank.graphs import StepGraphs
from worker.rank.host_pages import CUDAHostPages
from worker.rank.rank import Rank
from worker.rank.runner import ModelRunner
from worker.rank.sampling.state import SamplingState
from worker.rank.speculation import device_model
from worker.rank.streams import StepSlot, staging_size


def noted_steps(patch: pytest.MonkeyPatch) -> list[Plan]:
    """Collects the steps that a rank launches."""
    found: list[Plan] = []
    launch = Rank.launch

    def launched(rank: Rank, plan: Plan) -> Any:
        found.append(plan)
        return launch(rank, plan)

    patch.setattr(Rank, "launch", launched)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return str(folder)


@pytest.mark.randomized  # with more tokens
def test_mixed_requests_do_not_race_and_nothing_waits(folder: str) -> None:
    """Startup steps do not race, either, and leave nothing that tokens depend on."""
    asked = params(max_tokens=12 if IS_LONG else 5)
    served = on_cuda(folder, prompts(), asked, warms_up=True)
    assert (served.findings, served.waits) == ([], [])
    assert served.tokens == on_cpu(folder, prompts(), asked)
    assert served.num_launches > (600 if IS_LONG else 300)


@pytest.mark.long
def test_eager_steps_do_not_race(folder: str) -> None:
    served = on_cuda(folder, prompts(), params(), enforce_eager=True)
    assert (served.findings, served.waits) == ([], [])
    assert served.tokens == on_cpu(folder, prompts(), params())


def test_pages_of_the_host_do_not_race(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run during the previous step, which does not wait for them; only their own step
    waits."""
    in_flight: list[int] = []
    copy = CUDAHostPages.copy

    def noting(pages: CUDAHostPages, plan: Plan) -> None:
        copy(pages, plan)
        if plan.stores is not None:
            copies, compute = (
                cast(Lane, pages._store_lane.stream),
                cast(Lane, pages._streams.compute),
            )
            launched, awaited = compute.clock[compute.number], copies.clock[compute.number]
            in_flight.append(int(launched - awaited))

    monkeypatch.setattr(CUDAHostPages, "copy", noting)
    given, asked = 2 * prompts(4), 2 * params(4, 4)
    served = on_cuda(folder, given, asked, **HOST)
    assert max(in_flight) > 0, "copies wait for the compute stream"
    assert (served.findings, served.waits) == ([], [])
    assert served.num_loaded > 3
    assert served.tokens == on_cpu(folder, given, asked)


@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 6))])
def test_drafts_do_not_race(folder: str, count: int) -> None:
    """Requests without processors (the first two) never wait for the device. The third has
    processors, and arrives while the device places the others' rows."""
    given, asked = prompts(count, 3), params(count, 8)
    served = on_cuda(folder, given, asked, warms_up=count == 6, **DRAFTS)
    assert served.findings == []
    assert bool(served.waits) == (count > 2)
    assert served.tokens == on_cpu(folder, given, asked)


@pytest.mark.parametrize("count", [2, pytest.param(6, marks=pytest.mark.long)])
def test_drafts_of_a_model_do_not_race(
    folder: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts for itself, so all drafts with the same computation are right. Startup steps
    do not count for calibration."""
    steps = noted_steps(monkeypatch)

    def look(runner: ModelRunner) -> None:
        assert runner._drafter is not None
        calibration = runner._drafter._proposer.calibration
        assert (calibration.shares == np.float32(calibration._priors)).all()

    if count == 2:
        monkeypatch.setattr(device_model, "DRAFT_DTYPE", torch.float32)
    given, asked = prompts(count), params(count)
    own = by_model(folder)
    served = on_cuda(folder, given, asked, meddle=look, warms_up=count == 6, **own)
    if count == 2:  # the prompts, nine tokens at once, the rest, and one step in flight at the end
        assert len(steps) <= 4
    assert served.findings == []
    assert bool(served.waits) == (count > 2)
    assert served.tokens == on_cpu(folder, given, asked)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, DRAFTS], ids=["plain", "drafts"])
def test_grammars_do_not_race(options: dict[str, Any]) -> None:
    forms = [{"regex": r"\d{3}-\d{4}"}, {"choice": ["yes", "no"]}]
    asked = [
        SamplingParams(
            max_tokens=12,
            seed=i,
            temperature=1.0,
            structured_outputs=StructuredOutputsParams(**forms[i % 2]) if i < 4 else None,
        )
        for i in range(6)
    ]
    given = [3 * [1, 2, 3 + i] for i in range(6)]
    served = on_cuda("deploy/models/demo", given, asked, **options)
    assert served.findings == []
    assert bool(served.waits) == bool(options)
    assert served.tokens == on_cpu("deploy/models/demo", given, asked)


@pytest.mark.long
def test_blocks_do_not_race(tmp_path: Path) -> None:
    checkpoint = write_sdar(tmp_path, 4).folder
    given, asked = prompts(4), SamplingParams(temperature=0.0, max_tokens=10)
    given = [[token % 90 for token in prompt] for prompt in given]
    own = {"kind": BlockEngine, "dllm_threshold": 0.3}
    served = on_cuda(checkpoint, given, asked, warms_up=True, **own)
    assert served.findings == []
    assert served.tokens == on_cpu(checkpoint, given, asked, **own)


@pytest.fixture(scope="module")
def folder_of_latents(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deepseek")
    write_specimen("deepseek-v2-lite", folder)
    return str(folder)


def of_latents(count: int) -> list[list[int]]:
    return [[token % 97 for token in prompt] for prompt in prompts(count)]


@pytest.mark.randomized  # with more requests
def test_attention_to_latents_does_not_race(
    folder_of_latents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs share counters in one tensor across all steps and graphs; some prompts are in
    expanded form, in pieces."""
    monkeypatch.setattr(mla_prefill, "MIN_QUERIES", 8)
    monkeypatch.setattr(mla_prefill, "_PIECE_BYTES", 1)
    monkeypatch.setattr(mla_prefill, "_MIN_KEYS", 10)
    count, max_tokens = (6, 12) if IS_LONG else (4, 4)
    given, asked = of_latents(count), params(count, max_tokens)
    served = on_cuda(folder_of_latents, given, asked)
    assert (served.findings, served.waits) == ([], [])
    assert served.tokens == on_cpu(folder_of_latents, given, asked)


def test_graphs_on_counters_that_are_gone_are_found(folder_of_latents: str) -> None:
    def replace_counters(runner: ModelRunner) -> None:
        backend = runner._attention
        assert isinstance(backend, TritonAttention)
        assert backend._arrived is not None
        backend._arrived = backend._arrived.clone()

    options = {"meddle": replace_counters, "cudagraph_capture_sizes": (1,)}
    served = on_cuda(folder_of_latents, [[1]], params(1, 3), **options)
    assert any("gone" in finding for finding in served.findings), served.findings


def test_two_ranks_do_not_race(folder: str) -> None:
    given, asked = prompts(3), params(3, 4)
    served = on_cuda(folder, given, asked, num_ranks=2, cudagraph_capture_sizes=(1, 4))
    assert (served.findings, served.waits) == ([], [])
    assert served.tokens == on_cpu(folder, given, asked)


# Sabotages: each omission or addition must be detected.


def leave_out(what: type, method: str, caller: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Disables a method when called from a function of this name."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        kept = getattr(what, method)

        def called(self: Any, *args: Any) -> Any:
            return None if sys._getframe(1).f_code.co_name == caller else kept(self, *args)

        patch.setattr(what, method, called)

    return sabotage


def forget_fetched(patch: pytest.MonkeyPatch) -> None:
    fetch = StepSlot.fetch

    def fetched(slot: StepSlot, tensor: torch.Tensor) -> torch.Tensor:
        host = fetch(slot, tensor)
        slot._fetched.clear()
        return host

    patch.setattr(StepSlot, "fetch", fetched)


def grow_on_compute_stream(patch: pytest.MonkeyPatch) -> None:
    def grow(slot: StepSlot, num_bytes: int) -> None:
        size = staging_size(num_bytes)
        slot._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        slot._staged = torch.empty(size, dtype=torch.uint8, device=slot._streams.device)

    patch.setattr(StepSlot, "_grow", grow)


def share_one_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepSlot, "wait", lambda _: False)


def time_nothing(patch: pytest.MonkeyPatch) -> None:
    init = Event.__init__
    patch.setattr(Event, "__init__", lambda event, clocks, **_: init(event, clocks))


RACES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "inputs": ("race", leave_out(Lane, "wait_event", "upload")),
    "results": ("race", leave_out(Lane, "wait_event", "finish")),
    "fetches": ("race", leave_out(Lane, "wait_event", "hold_back")),
    "completion": ("race", leave_out(Event, "synchronize", "wait")),
    "times": ("event", leave_out(Event, "synchronize", "wait")),
    "slots": ("race", share_one_slot),
    "kept": ("free", forget_fetched),
    "staging": ("race", grow_on_compute_stream),
    "timing": ("event", time_nothing),
}
SHORT = ("fetches", "kept")
"""One sabotage of each kind, except for events, one of which is among the captures."""


@pytest.mark.parametrize(
    "name",
    [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in RACES],
)
def test_what_is_left_out_is_found(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, sabotage = RACES[name]
    sabotage(monkeypatch)
    # Graphs only sample for all rows if none has processors, as the third.
    count = 2 if name == "fetches" else 3
    served = on_cuda(folder, prompts(count), params(count, 6))
    assert any(finding.startswith(kind) for finding in served.findings), served.findings


@pytest.mark.long
@pytest.mark.parametrize(
    ("wait", "caller"), [("wait_stream", "_store"), ("wait_event", "_wait")], ids=str
)
def test_pages_that_nobody_waits_for_are_found(
    folder: str, wait: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(Lane, wait, caller)(monkeypatch)
    served = on_cuda(folder, 2 * prompts(4), 2 * params(4, 4), **HOST)
    assert any("race" in one for one in served.findings)


@pytest.mark.long
def test_copies_to_pageable_memory_are_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    served = on_cuda(folder, 2 * prompts(4), 2 * params(4, 4), **HOST)
    assert any("pageable" in one for one in served.waits)


def wait_in_draws(patch: pytest.MonkeyPatch) -> None:
    process = SamplingState.process

    def waiting(state: SamplingState, logits: torch.Tensor, *rest: Any) -> None:
        logits.sum().item()
        process(state, logits, *rest)

    patch.setattr(SamplingState, "process", waiting)


def copy_pageable(patch: pytest.MonkeyPatch) -> None:
    process = SamplingState.process

    def copying(state: SamplingState, logits: torch.Tensor, *rest: Any) -> None:
        logits.add_(torch.zeros(1).to(logits.device, non_blocking=True))
        process(state, logits, *rest)

    patch.setattr(SamplingState, "process", copying)


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(wait_in_draws, id="item"),
        pytest.param(copy_pageable, id="pageable", marks=pytest.mark.long),
    ],
)
def test_a_wait_is_found(
    folder: str, sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    served = on_cuda(folder, prompts(3)[2:], params(3, 3)[2:])
    assert len(served.waits) == 1


Harm = Callable[[ModelRunner, torch.Tensor], object]


def harm_forward(patch: pytest.MonkeyPatch, harm: Harm) -> None:
    run_model = ModelRunner.run_model

    def harmed(runner: ModelRunner, *args: Any) -> torch.Tensor:
        hidden = run_model(runner, *args)
        harm(runner, hidden)
        return hidden

    patch.setattr(ModelRunner, "run_model", harmed)


def _on_another_stream(runner: ModelRunner, hidden: torch.Tensor) -> None:
    assert runner._streams is not None
    with torch.cuda.stream(runner._streams.copy):
        hidden.add_(0)


def _by_event(runner: ModelRunner, _: torch.Tensor) -> None:
    assert runner._streams is not None
    runner._streams.compute.record_event()


def _from_the_host(_: ModelRunner, hidden: torch.Tensor) -> None:
    hidden.add_(torch.zeros(1).pin_memory().to(hidden.device, non_blocking=True))


CAPTURES: dict[str, Harm] = {
    "waits": lambda _, hidden: hidden.sum().item(),
    "another stream": _on_another_stream,
    "event": _by_event,
    "the host's memory": _from_the_host,
}


@pytest.mark.parametrize("name", list(CAPTURES))
def test_what_no_graph_may_hold_is_found(
    folder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm_forward(monkeypatch, CAPTURES[name])
    served = on_cuda(folder, [[1]], params(1, 1), cudagraph_capture_sizes=(1,))
    assert any(finding.startswith("graph") for finding in served.findings), served.findings


def _replace_caches(runner: ModelRunner) -> None:
    copies = {
        layer: [plane.clone() for plane in cache.planes]
        for layer, cache in runner._kv_caches.items()
    }
    runner._kv_caches = {
        layer: KVCache(planes=tuple(planes), v=planes[1]) for layer, planes in copies.items()
    }
    runner._planes = [plane for planes in copies.values() for plane in planes]


def _replace_pages(runner: ModelRunner) -> None:
    tables = runner._tables
    tables.token_pool = tables.token_pool.clone()
    tables.flat_tokens = tables.token_pool.view(-1)


@pytest.mark.parametrize("meddle", [_replace_caches, _replace_pages], ids=["caches", "tables"])
def test_graphs_on_memory_that_is_gone_are_found(
    folder: str, meddle: Callable[[ModelRunner], None]
) -> None:
    served = on_cuda(folder, [[1]], params(1, 3), cudagraph_capture_sizes=(1,), meddle=meddle)
    assert any("gone" in finding for finding in served.findings), served.findings


def test_graphs_of_drafts_on_memory_that_is_gone_are_found(folder: str) -> None:
    def replace_caches(runner: ModelRunner) -> None:
        assert runner._drafts is not None
        runner._drafts._caches = {
            layer: KVCache(planes=tuple(planes), v=planes[1])
            for layer, cache in runner._drafts._caches.items()
            for planes in ([plane.clone() for plane in cache.planes],)
        }

    options = {"meddle": replace_caches, "cudagraph_capture_sizes": (1,), **by_model(folder)}
    served = on_cuda(folder, [[1]], params(1, 3), **options)
    assert any("gone" in finding for finding in served.findings), served.findings


@pytest.mark.parametrize("are_dropped", [True, False], ids=["dropped", "kept"])
def test_graphs_end_before_their_group(
    folder: str, are_dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for graphs, which are kept alive by the frames of a failed step."""
    held = []
    close = Rank.close

    def closing(rank: Rank) -> bool:
        held.append(rank._runner)
        return close(rank)

    monkeypatch.setattr(Rank, "close", closing)
    if not are_dropped:
        monkeypatch.setattr(StepGraphs, "close", lambda _: held.append(_))
    served = on_cuda(folder, [[1]], params(1, 1), num_ranks=2, cudagraph_capture_sizes=(1,))
    found = [finding for finding in served.findings if "its group ends" in finding]
    assert bool(found) != are_dropped


@pytest.mark.long
def test_ranks_that_disagree_are_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_reduce = NcclGroup.all_reduce

    def other(group: NcclGroup, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return all_reduce(group, tensor.view(-1) if group.rank else tensor, **options).view_as(
            tensor
        )

    monkeypatch.setattr(NcclGroup, "all_reduce", other)
    with pytest.raises(RuntimeError, match=r"all_reduce of .*, all_reduce of "):
        on_cuda(folder, [[1]], params(1, 1), num_ranks=2, cudagraph_capture_sizes=(1,))
