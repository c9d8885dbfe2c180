"""Launches of each family's captured steps, without waits or host tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.linear import scaled
from tests.support.cuda.budgets import BUDGETS, NUM_LAYERS, count
from tests.support.cuda.counted import Counts, HostWait
from tests.support.cuda.tensors import DeviceMix
from worker.models.config.families import FAMILIES
from worker.models.config.family import LINEAR
from worker.models.layers.linear import Linear
from worker.rank.runner import ModelRunner

SHORT = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LLaDA2MoeModelLM")


def test_every_family_has_a_budget() -> None:
    assert set(BUDGETS) == set(FAMILIES), "make families"


@pytest.mark.checks("cuda", of=BUDGETS, against="launch budget")
@pytest.mark.parametrize(
    "architecture",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in BUDGETS],
)
def test_steps_stay_within_their_budgets(architecture: str, tmp_path: Path) -> None:
    """Waits for the device or mixed devices would raise."""
    budget = BUDGETS[architecture]
    counts = count(budget.model, tmp_path)
    assert counts.layer <= budget.layer
    assert counts.rest <= budget.rest
    assert counts.draw <= budget.draw
    assert counts.filtered <= budget.filtered


@pytest.mark.parametrize(
    "architecture",
    [name if name == SHORT[1] else pytest.param(name, marks=pytest.mark.long) for name in BUDGETS],
)
def test_steps_of_any_lengths_launch_no_more_than_decodes(
    architecture: str, tmp_path: Path
) -> None:
    """Except for a cast of the row offsets, and two launches per layer of linear attention (four if
    decays differ by dimension), which computes long rows in pieces."""
    counts = count(BUDGETS[architecture].model, tmp_path)
    by_pieces = 2 * (LINEAR in FAMILIES[architecture].layer_kinds)
    if architecture == "KimiLinearForCausalLM":
        by_pieces = 4
    if counts.ragged:
        assert counts.ragged <= counts.rest + NUM_LAYERS * (counts.layer + by_pieces) + 1


def test_linear_attention_takes_five_launches(tmp_path: Path) -> None:
    """Two projections, inputs, states and outputs, in addition to two norms and three launches of
    the MLP; two more in a step with rows of any length."""
    counts = count(BUDGETS["Qwen3_5ForCausalLM"].model, tmp_path, 4)
    assert counts.layers[:3] == (10, 10, 10)
    assert counts.ragged <= counts.rest + 3 * 12 + counts.layers[3] + 1


def test_quantizing_fp8_inputs_takes_one_launch_per_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the attention output: norms and the activation quantize what they compute."""
    monkeypatch.setattr(scaled, "_WEIGHT_ONLY_ROWS", 32)  # fewer than in a step of any lengths
    options = {"quantization": "fp8", "dtype": "bfloat16"}
    found = []
    for _ in range(2):
        first, second = (
            count(BUDGETS["LlamaForCausalLM"].model, tmp_path, number, **options).ragged
            for number in (1, 2)
        )
        found.append(second - first)
        monkeypatch.setattr(Linear, "fp8_inputs", None)
    assert found == [10, 13]


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_whole_experts_take_no_launch_more(architecture: str, tmp_path: Path) -> None:
    """Kernels skip pairs of other ranks' experts."""
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    budget = BUDGETS[architecture]
    counts = count(budget.model, tmp_path, **options)
    assert counts.layer <= budget.layer
    assert counts.rest <= budget.rest


def sabotaged(folder: Path, harm: Callable[[torch.Tensor], object]) -> Counts:
    """Llama with a different operation on hidden states in each layer."""

    def prepare(runner: ModelRunner) -> None:
        for layer in runner.model.layers:
            forward = layer.forward

            def harmed(hidden: torch.Tensor, *args: Any, forward: Any = forward) -> Any:
                harm(hidden)
                return forward(hidden, *args)

            layer.forward = harmed  # type: ignore[method-assign]

    return count(BUDGETS["LlamaForCausalLM"].model, folder, 1, prepare=prepare)


def test_a_launch_more_is_found(tmp_path: Path) -> None:
    assert sabotaged(tmp_path, lambda hidden: hidden + 1).layer == 10


def test_what_torch_makes_of_views_is_no_launch(tmp_path: Path) -> None:
    assert sabotaged(tmp_path, lambda hidden: hidden[1:].T[None].split(1)).layer == 9


@pytest.mark.parametrize(
    "harm",
    [
        lambda hidden: hidden.sum().item(),
        lambda hidden: bool((hidden > 0).any()),
        lambda hidden: hidden.tolist(),
        lambda hidden: hidden.cpu(),
        lambda hidden: torch.equal(hidden, hidden),
        lambda hidden: hidden[hidden > 0],
        lambda hidden: hidden.copy_(torch.zeros(hidden.shape)),
        lambda hidden: hidden.copy_(torch.zeros(hidden.shape), non_blocking=True),
        lambda hidden: torch.zeros(hidden.shape).copy_(hidden, non_blocking=True),
        lambda hidden: torch.tensor([1.0, 2.0], device=hidden.device),
    ],
    ids=[
        *("item", "bool", "tolist", "cpu", "equal", "mask", "copy", "pageable"),
        *("to-pageable", "tensor"),
    ],
)
def test_a_wait_for_the_device_is_found(
    harm: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    with pytest.raises(HostWait):
        sabotaged(tmp_path, harm)


@pytest.mark.parametrize(
    "harm",
    [
        lambda hidden: hidden + torch.ones(hidden.shape),
        lambda hidden: hidden.index_select(0, torch.arange(2)),
        lambda hidden: hidden[torch.arange(2)],
    ],
    ids=["sum", "index_select", "index"],
)
def test_a_mixture_of_devices_is_found(
    harm: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    with pytest.raises(DeviceMix):
        sabotaged(tmp_path, harm)


def test_pinned_memory_may_be_copied_from(tmp_path: Path) -> None:
    counts = sabotaged(
        tmp_path, lambda hidden: torch.ones(3).pin_memory().to(hidden.device, non_blocking=True)
    )
    assert counts.layer == 10
