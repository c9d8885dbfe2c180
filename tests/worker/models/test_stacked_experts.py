"""Experts stacked in two tensors, as in released Qwen3.5 checkpoints, equal those stored one by
one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.families import write_specimen
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.engines.threaded_group import run_ranks
from worker.models.layers.tensor_parallel import TensorParallelGroup

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight")
PROMPT = [3 + at % 80 for at in range(0, 200, 7)]


def stack(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name in list(weights):
        if match := EXPERT.fullmatch(name):
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = weights.pop(name)
    assert experts
    stacked = {
        key: torch.stack([parts[number] for number in range(len(parts))])
        for key, parts in experts.items()
    }
    for (block, kind), tensor in stacked.items():
        if kind == "down":
            weights[f"{block}.down_proj"] = tensor
        elif kind == "gate":
            weights[f"{block}.gate_up_proj"] = torch.cat((tensor, stacked[block, "up"]), dim=1)
    save_file(weights, path)


def last_logits(folder: Path, group: TensorParallelGroup | None = None) -> torch.Tensor:
    world_size = 1 if group is None else group.world_size
    runner = make_runner(str(folder), group, tensor_parallel_size=world_size)
    request = Request(prompt=PROMPT, new_tokens=1)
    generate(runner, [request])
    return request.logits[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    base = Path(tmp_path_factory.mktemp("experts"))
    one_by_one, stacked = base / "one", base / "stacked"
    write_specimen("qwen3-5-images", one_by_one)
    shutil.copytree(one_by_one, stacked)
    stack(stacked)
    return one_by_one, stacked


def test_stacked_experts_are_the_same(folders: tuple[Path, Path]) -> None:
    one_by_one, stacked = folders
    assert torch.equal(last_logits(stacked), last_logits(one_by_one))


def test_each_rank_reads_its_share(folders: tuple[Path, Path]) -> None:
    one_by_one, stacked = folders
    expected = last_logits(one_by_one)
    for logits in run_ranks(2, lambda group: last_logits(stacked, group)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
