"""Engines with LoRA adapters sample the tokens of merged weights, in any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.adapters import merge_adapter, write_adapter
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.sdar import write_sdar
from tests.support.engines import block_requests
from tests.support.engines.adapter_engine import adapter_of, engine_with
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.engine_driver import Engine
from tests.support.engines.exactness import make_prompts
from worker.protocol.sampling import SamplingParams

PROMPTS = [[number, *prompt[1:300]] for number, prompt in enumerate(make_prompts(9))]
"""Prompts, a third of them for each adapter and for none: the first token selects it."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {
        "cpu_backend": "auto",
        **{"max_num_batched_tokens": 96, "kv_cache_tokens": 424, "page_size": 8},
        **{"speculative_method": "ngram", "speculative_adaptive": False},
    },
    "torch": {},
    "draft": {"speculative_method": "draft", "speculative_adaptive": False},
}
"""The compiled library's kernel, chunks, few pages and drafts of the text; the reference; drafts of
a model without adapters."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint, and two adapters of it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder / "base")
    adapters = [
        write_adapter(folder / "base", folder / str(number), rank, seed=number)
        for number, rank in enumerate((8, 3), 1)
    ]
    return [folder / "base", *adapters]


@pytest.fixture(scope="module")
def expected(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of the prompts with merged weights."""
    base, *adapters = folders
    merged = [base]
    for number, adapter in enumerate(adapters):
        folder = tmp_path_factory.mktemp("merged") / str(number)
        merged.append(merge_adapter(base, adapter, folder))
    tokens: dict[int, list[int]] = {}
    for number, folder in enumerate(merged):
        mine = [index for index, prompt in enumerate(PROMPTS) if adapter_of(prompt, 2) == number]
        with Engine(str(folder)) as engine:
            outcomes = engine.outcomes([PROMPTS[index] for index in mine], PARAMS)
        tokens |= zip(mine, (outcome.token_ids for outcome in outcomes), strict=True)
    return [tokens[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "name",
    [one if one == "chunks" else pytest.param(one, marks=pytest.mark.long) for one in SETTINGS],
)
def test_tokens_equal_those_of_merged_weights(
    name: str, folders: list[Path], expected: list[list[int]]
) -> None:
    options = {"cpu_backend": "torch", **SETTINGS[name]}
    if name == "draft":
        options["speculative_model"] = str(folders[0])
    with engine_with(folders[1:])(str(folders[0]), **options) as engine:
        for _ in range(2):  # then cached
            outcomes = engine.outcomes(PROMPTS, PARAMS)
            assert [outcome.token_ids for outcome in outcomes] == expected


def test_running_blocks_have_adapters(tmp_path: Path) -> None:
    """Rows of an adapter compute positions that others would skip, as nobody reads them."""
    base = tmp_path / "base"
    base.mkdir()
    write_sdar(base, 8)
    adapter = write_adapter(base, tmp_path / "adapter", 6)
    merged = merge_adapter(base, adapter, tmp_path / "merged")
    given, params = block_requests.prompts(6), block_requests.sampling(6)
    options: dict[str, Any] = {"cpu_backend": "torch", "kv_cache_tokens": 2048}
    with engine_with([adapter], BlockEngine)(str(base), **options) as engine:
        outputs = engine.serve(given, params)
    for number, folder in enumerate((base, merged)):
        mine = [index for index, prompt in enumerate(given) if adapter_of(prompt, 1) == number]
        with BlockEngine(str(folder), **options) as engine:
            expected = engine.serve([given[i] for i in mine], [params[i] for i in mine])
        assert [outputs[i].token_ids for i in mine] == [one.token_ids for one in expected]
