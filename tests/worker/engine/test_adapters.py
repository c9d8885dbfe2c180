"""LoRA adapters through the whole engine: more adapters than slots, with the tokens of each
alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.adapters import write_adapter
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.engine_driver import Engine, Outcome
from worker.core.adapter_folder import static_adapters
from worker.llm import LLM, LoRARequest, TokensPrompt
from worker.protocol.adapters import AdapterRef
from worker.protocol.blocks import cache_scope
from worker.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def refs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    parent = tmp_path_factory.mktemp("adapters")
    folders = {str(n): str(write_adapter(base, parent / str(n), 2 + n, seed=n)) for n in range(4)}
    return static_adapters(folders, 16)


def submit(engine: Engine, ref: AdapterRef | None) -> tuple[str, Outcome]:
    salt = "" if ref is None else cache_scope(adapter=ref.version)
    return engine.submit(PROMPT, GREEDY, adapter=ref, cache_salt=salt)


@pytest.mark.parametrize(
    ("overlap_depth", "tensor_parallel_size"),
    [
        (1, 1),
        pytest.param(0, 1, marks=pytest.mark.long),
        pytest.param(1, 2, marks=pytest.mark.long),
    ],
)
def test_more_adapters_than_slots(
    base: Path, refs: list[AdapterRef], overlap_depth: int, tensor_parallel_size: int
) -> None:
    options = {
        "enable_lora": True,
        "batch_invariant": True,
        "overlap_depth": overlap_depth,
        "tensor_parallel_size": tensor_parallel_size,
    }
    wanted = [*refs, None]
    alone: list[list[int]] = []
    with Engine(str(base), max_loras=1, **options) as engine:
        for ref in wanted:
            outputs = dict([submit(engine, ref)])
            engine.drain(outputs)
            alone += [outcome.token_ids for outcome in outputs.values()]
    assert len(set(map(tuple, alone))) == len(wanted)
    with Engine(str(base), max_loras=2, max_cpu_loras=3, **options) as engine:
        outputs = dict(submit(engine, ref) for ref in [*wanted, *wanted[::-1]])
        engine.drain(outputs)
        found = [outcome.token_ids for outcome in outputs.values()]
        assert found == [*alone, *alone[::-1]]
        totals = engine.core.report().load.adapters
        assert totals is not None
        assert totals.num_reads >= 4
        assert len(totals.on_device) == 2


def test_files_that_have_changed_since_they_were_loaded_are_not_used(
    base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(base, tmp_path / "adapter", 4)
    [ref] = static_adapters({"mine": str(folder)}, 16)
    write_adapter(base, folder, 4, seed=1)
    [newer] = static_adapters({"mine": str(folder)}, 16)
    with Engine(str(base), enable_lora=True) as engine:
        outputs = dict(submit(engine, version) for version in (ref, newer))
        engine.drain(outputs)
        old, new = outputs.values()
        assert old.error is not None
        assert "has changed: load the adapter again" in old.error
        assert not old.token_ids
        assert len(new.token_ids) == 5


def test_an_adapter_of_another_model_fails_its_requests_only(
    base: Path, refs: list[AdapterRef], tmp_path: Path
) -> None:
    write_checkpoint("qwen3", tmp_path / "other", hidden_size=128)
    folder = write_adapter(tmp_path / "other", tmp_path / "adapter", 4)
    [wrong] = static_adapters({"wrong": str(folder)}, 16)
    with Engine(str(base), enable_lora=True) as engine:
        outputs = dict(submit(engine, ref) for ref in (wrong, refs[0], None))
        engine.drain(outputs)
        failed, *others = outputs.values()
        assert failed.error is not None
        assert failed.error.startswith("LoRA adapter wrong could not be loaded: ")
        assert not failed.token_ids
        assert all(len(outcome.token_ids) == 5 for outcome in others)


@pytest.mark.long
def test_offline_requests_name_a_folder(base: Path, refs: list[AdapterRef]) -> None:
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    request = LoRARequest("a", 1, refs[0].folder)
    options = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_cache_tokens": 512}
    with LLM(str(base), enable_lora=True, **options) as llm:
        found = [
            llm.generate(prompt, GREEDY, detokenize=False, lora_request=lora)[0]
            for lora in (None, request, request)
        ]
        plain, first, second = (output.outputs[0].token_ids for output in found)
        assert first == second != plain
        with pytest.raises(ValueError, match="LoRA adapter b: /none has no adapter_config"):
            llm.generate(prompt, GREEDY, lora_request=LoRARequest("b", 1, "/none"))
