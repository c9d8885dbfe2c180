"""A head computes in the engine what it computes in training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from deploy.models.mtp_training import HEAD_FILE, HeadModule, save_head
from tests.support.engines.engine_driver import Engine
from tests.support.engines.speculation_cases import prompts
from tests.support.paths import MODELS
from worker.protocol.sampling import SamplingParams
from worker.rank.speculation.heads import HeadProposer
from worker.rank.speculation.native_heads import NativeHeadProposer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a head of random weights."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("demo") / "demo"
    shutil.copytree(MODELS / "demo", folder)
    torch.manual_seed(2)
    save_head(HeadModule(Qwen3ForCausalLM.config_class.from_pretrained(folder)), folder)
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_outputs_are_those_of_training(folder: Path, backend: str) -> None:
    (prompt,) = prompts(1)
    options = {"speculative_method": "mtp", "max_model_len": 256, "kv_cache_tokens": 512}
    with Engine(str(folder), cpu_backend=backend, max_num_batched_tokens=16, **options) as engine:
        sampled = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))[0]
        heads = engine.runner._heads
        assert isinstance(heads, NativeHeadProposer if backend == "native" else HeadProposer)
        outputs = heads._outputs.flatten(0, -2)
        outputs = outputs[outputs.abs().sum(-1) > 0]

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = HeadModule(model.config)
    head.load(folder / HEAD_FILE)
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *sampled]])
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        embedded = model.get_input_embeddings()(ids)
        expected, _ = head(embedded[:, 1:], states[:, :-1], 0, None)
    torch.testing.assert_close(outputs, expected[:, -1], atol=2e-3, rtol=1e-3)
