"""--quantization fp8: weights of unquantized checkpoints become FP8 on loading."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import BlockScales, Fp8Rows, PackedLinear, pack_quantized_linear_weight
from kernels.linear import pack_codes, scaled
from kernels.linear.scaled import Fp8Weight, product_scales
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.families import SPECIMENS, write_specimen
from tests.support.checkpoints.moe import QWEN3_MOE, write_moe
from tests.support.engines.engine_driver import Engine
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.paths import ROOT
from worker.config import EngineConfig
from worker.models.layers import online_fp8
from worker.models.layers.linear import Linear
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.tokenizer import load_tokenizer
from worker.rank.preflight import check_engine

DEMO = ROOT / "deploy" / "models" / "demo"


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight whose rows are e4m3 numbers times a scale that makes 448 of the largest one."""
    scales = weight.abs().amax(dim=-1, keepdim=True) / 448.0
    return (weight / scales).to(torch.float8_e4m3fn).float() * scales


def write_rounded(folder: Path) -> None:
    """Rounds the checkpoint's linear weights."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in [name for name in tensors if re.search(r"_proj\.weight$", name)]:
        tensors[name] = rounded(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    request = Request(prompt=[5, 17, 30, 4, 8])
    generate(make_runner(str(folder), **options), [request])
    return torch.stack(request.logits)


@pytest.mark.parametrize("cpu_backend", ["auto", "torch"])
def test_logits_are_those_of_rounded_weights(tmp_path: Path, cpu_backend: str) -> None:
    torch.set_num_threads(1)
    write_checkpoint("qwen3", tmp_path)
    tensors = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    own = logits_of(tmp_path, quantization="fp8", cpu_backend=cpu_backend)
    write_rounded(tmp_path)
    assert torch.equal(own, logits_of(tmp_path, cpu_backend=cpu_backend))


def test_experts_are_quantized_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_moe(QWEN3_MOE, tmp_path)
    own = logits_of(tmp_path, quantization="fp8")
    write_rounded(tmp_path)
    assert torch.equal(own, logits_of(tmp_path))


def test_checkpoints_in_other_formats_are_rejected(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    formats: dict[str, dict[str, Any]] = {
        "fp8": {"quant_method": "fp8"},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 64},
    }
    for name, content in formats.items():
        text = json.dumps({**config, "quantization_config": content})
        (tmp_path / "config.json").write_text(text)
        engine = EngineConfig(model=str(tmp_path), quantization="fp8")
        if name == "fp8":
            check_engine(engine)
        else:
            with pytest.raises(ValueError, match="--quantization fp8 needs an unquantized or"):
                check_engine(engine)


def pack_for_fp8_products(
    codes: torch.Tensor, scaling: BlockScales, *, dtype: torch.dtype, batch_invariant: bool
) -> PackedLinear:
    """Packs as on an H100; products of FP8 with a scale per row also run on CPU."""
    packed = pack_codes(codes, scaling, dtype=dtype)
    assert packed is not None
    scales = product_scales(packed, dtype, (9, 0))
    if scales is None:
        return pack_quantized_linear_weight(codes, scaling, dtype=dtype)
    return Fp8Weight(packed, scales)


QUANTIZATIONS = {"gemma2": (12, 48), "qwen3-5": (12, 40), "longcat": (32, 64)}
"""Launches of `quantize_fp8` in four steps of three layers, and those without fused ones. LongCat's
experts and router read the same input as its MLPs, which are quantized separately."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUANTIZATIONS else pytest.param(name, marks=pytest.mark.long)
        for name in SPECIMENS
    ],
)
def test_norms_and_activations_quantize_what_products_would(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every bit, with fewer launches."""
    torch.set_num_threads(1)
    write_specimen(name, tmp_path)
    monkeypatch.setattr(online_fp8, "pack_quantized_linear_weight", pack_for_fp8_products)
    monkeypatch.setattr(scaled, "_WEIGHT_ONLY_ROWS", 0)
    quantize, launches, logits = scaled.quantize_fp8, [0, 0], []
    for number in range(2):

        def counted(x: torch.Tensor, *, by_block: bool, number: int = number) -> Fp8Rows:
            launches[number] += 1
            return quantize(x, by_block=by_block)

        monkeypatch.setattr(scaled, "quantize_fp8", counted)
        options = {"dtype": "bfloat16", "cpu_backend": "torch"}
        logits.append(logits_of(tmp_path, quantization="fp8", **options))
        monkeypatch.setattr(Linear, "fp8_inputs", None)
    assert torch.equal(*logits)
    assert launches[0] <= launches[1]
    if name in QUANTIZATIONS:
        assert tuple(launches) == QUANTIZATIONS[name]


def perplexity(
    engine: Engine, questions: Sequence[list[int]], answers: Sequence[list[int]]
) -> float:
    """exp of the mean negative log-probability of the answers' tokens."""
    texts = [question + answer for question, answer in zip(questions, answers, strict=True)]
    values = list[float]()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for outcome, answer in zip(engine.outcomes(texts, params), answers, strict=True):
        assert outcome.prompt_logprobs is not None, outcome.error
        values += [token.logprobs[0] for token in outcome.prompt_logprobs[-len(answer) :]]
    return math.exp(-sum(values) / len(values))


def test_perplexity_of_the_demo_model_stays_within_a_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With FP8 weights, and with FP8 activations of all rows, too."""
    tokenizer = load_tokenizer(str(DEMO))
    lines = (ROOT / "deploy" / "models" / "demo_heldout.jsonl").read_text().splitlines()[::8]
    chats = [chat for chat in map(json.loads, lines) if len(chat["messages"]) == 1]
    questions = [
        tokenizer.encode(
            f"<|im_start|>user\n{chat['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        )
        for chat in chats
    ]
    answers = [tokenizer.encode(f"{chat['answer']}<|im_end|>") for chat in chats]
    options: dict[str, Any] = {"dtype": "bfloat16", "cpu_backend": "torch"}
    found = []
    for quantization in ("auto", "fp8", "products"):
        if quantization == "products":
            monkeypatch.setattr(online_fp8, "pack_quantized_linear_weight", pack_for_fp8_products)
            monkeypatch.setattr(scaled, "_WEIGHT_ONLY_ROWS", 0)
            quantization = "fp8"
        with Engine(str(DEMO), quantization=quantization, **options) as engine:
            found.append(perplexity(engine, questions, answers))
    plain, weights, products = found
    assert len(set(found)) == 3
    assert abs(weights / plain - 1.0) < 0.01, found
    assert abs(products / plain - 1.0) < 0.01, found
