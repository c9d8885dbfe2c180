"""Stacked experts: in two tensors, as in released Qwen3.5 checkpoints, they equal those stored one
by one; quantized in three, as in Step 3.5, they equal the dequantized ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.fp8 import BLOCK, dequantize, quantize
from tests.support.checkpoints.quantized import LAYOUTS, Quantized
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.engines.threaded_group import run_ranks
from worker.models.config.model_config import load_model_config
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model, check_weights, load_weights

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


PLAIN = [
    f"model.layers.{layer}.{name}"
    for layer in range(3)
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(
            f"{mlp}.{part}_proj"
            for mlp in ("mlp", "share_expert")
            for part in ("gate", "up", "down")
        ),
        "moe.gate",
    )
]
"""Modules that Step 3.5's FP8 checkpoint leaves out: all but the routed experts, and `g_proj`,
which is not quantized all the same."""
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": PLAIN,
    },
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": PLAIN,
    },
}


def fp8_blocks(matrix: torch.Tensor) -> Quantized:
    values, scales = quantize(matrix)
    return {"weight": values, "weight_scale_inv": scales}, dequantize(values, scales)


def nvfp4(matrix: torch.Tensor) -> Quantized:
    return LAYOUTS["nvfp4"].draw(*matrix.shape)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("step"))
    write_specimen("step3p5", folder)
    return folder


def write_quantized(
    name: str, quantize: Callable[[torch.Tensor], Quantized], plain: Path, folder: Path
) -> None:
    """Quantizes the experts of a checkpoint, which `plain` then holds dequantized."""
    tensors = load_file(plain / "model.safetensors")
    dequantized = dict(tensors)
    for key in [key for key in tensors if re.search(r"\.moe\.\w+_proj\.weight", key)]:
        parts, values = zip(*map(quantize, tensors.pop(key)), strict=True)
        dequantized[key] = torch.stack(values).float()
        module = key.removesuffix(".weight")
        for end in parts[0]:
            tensors[f"{module}.{end}"] = torch.stack([part[end] for part in parts])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = FORMATS[name]
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path, rank: int, world_size: int, **options: Any) -> Any:
    cpu = torch.device("cpu")
    group = TensorParallelGroup(rank=rank, world_size=world_size, device=cpu, process_group=None)
    own = LayerOptions(
        group=group, dtype=torch.float32, device=cpu, batch_invariant=False, **options
    )
    model = build_model(load_model_config(str(folder)), own, 64)
    load_weights(model, model.config, show_progress=False)
    return model


@pytest.mark.checks(
    formats=("fp8-blocks", "nvfp4"),
    of="Step3p5ForCausalLM",
    against="the same weights dequantized",
)
@pytest.mark.parametrize(
    ("name", "quantize", "tolerance"),
    [("fp8-blocks", fp8_blocks, 0.0), ("nvfp4", nvfp4, 1e-6)],  # NVFP4's reference is in fp64
)
def test_quantized_stacks_are_the_dequantized_experts(
    step: Path,
    tmp_path: Path,
    name: str,
    quantize: Callable[[torch.Tensor], Quantized],
    tolerance: float,
) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    shutil.copytree(step, plain)
    write_quantized(name, quantize, plain, folder)
    for world_size, options in ((1, {}), (2, {}), (2, {"expert_parallel": True})):
        for rank in range(world_size):
            own, expected = (load(one, rank, world_size, **options) for one in (folder, plain))
            for index in (0, 2):
                experts, others = (
                    one.layers[index].mlp._experts._experts for one in (own, expected)
                )
                for weights, other in zip(experts, others, strict=True):
                    torch.testing.assert_close(weights.values, other.values, rtol=tolerance, atol=0)
    torch.testing.assert_close(
        last_logits(folder), last_logits(plain), rtol=0, atol=100 * tolerance
    )


def test_a_stack_of_another_number_of_experts_is_rejected(step: Path, tmp_path: Path) -> None:
    shutil.copytree(step, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.moe.up_proj.weight"
    tensors[key] = tensors[key][:7].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    cpu = torch.device("cpu")
    options = LayerOptions(
        group=TensorParallelGroup.alone(cpu), dtype=torch.float32, device=cpu, batch_invariant=False
    )
    model = build_model(load_model_config(str(tmp_path)), options, 64)
    with pytest.raises(ValueError, match=r"has shape \[7, 32, 64\], .* implies \[8, 32, 64\]"):
        check_weights(model, model.config)


LLAMA4_PLAIN = ("re:.*self_attn", "re:.*router", "re:.*lm_head")
"""Modules that FP8 checkpoints of Llama 4 leave out."""


def split_llama4(folder: Path) -> None:
    """Converts a checkpoint of Llama 4 to FP8 as LLM Compressor does, with three tensors for each
    expert. Keeps its dequantized values in the original form, in the folder `plain` beside it."""
    plain = folder.with_name("plain")
    tensors = load_file(plain / "model.safetensors")
    quantized = dict(tensors)

    def convert(name: str, matrix: torch.Tensor) -> torch.Tensor:
        parts, values = LAYOUTS["fp8-channel"].draw(*matrix.shape)
        quantized.update({f"{name}.{end}": part for end, part in parts.items()})
        return values.float()

    for key in [key for key in tensors if re.search(r"feed_forward\..*_proj", key)]:
        del quantized[key]
        if key.endswith(".weight"):
            tensors[key] = convert(key.removesuffix(".weight"), tensors[key])
            continue
        block, stacked = key.rpartition(".")[0], tensors[key].transpose(1, 2)
        names = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
        values = [
            torch.cat(
                [
                    convert(f"{block}.{expert}.{name}", part)
                    for name, part in zip(names, matrix.chunk(len(names)), strict=True)
                ]
            )
            for expert, matrix in enumerate(stacked)
        ]
        tensors[key] = torch.stack(values).transpose(1, 2).contiguous()
    folder.mkdir()
    save_file(quantized, folder / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quantization = {**LAYOUTS["fp8-channel"].settings, "ignore": list(LLAMA4_PLAIN)}
    config |= {"for_llm_compressor": True, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.long
def test_llama4_in_fp8_with_a_tensor_for_each_expert(tmp_path: Path) -> None:
    write_specimen("llama4", tmp_path / "plain")
    split_llama4(tmp_path / "fp8")
    torch.testing.assert_close(
        last_logits(tmp_path / "fp8"), last_logits(tmp_path / "plain"), rtol=0, atol=1e-4
    )
