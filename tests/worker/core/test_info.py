"""EngineInfo: limits, salt and end tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.config import EngineConfig
from worker.core.info import begin_salt, build_engine_info
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.plan.messages import Hello
from worker.protocol.page_groups import ONE_GROUP, PageGroups

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}


def test_block_hashes_are_of_a_type_of_cache(tmp_path: Path) -> None:
    """A cache of another type has other keys and values for the same tokens."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig.of(model=str(tmp_path), load_format="dummy")

    def salt(dtype: str, cache: str = "") -> str:
        hello = Hello(0, 9, 256, 100, dtype=dtype, kv_cache_dtype=cache)
        return build_engine_info(config, [hello], begin_salt(config)()).block_hash_salt

    assert salt("bfloat16") == salt("bfloat16") != salt("float32")
    assert salt("bfloat16") != salt("bfloat16", "fp8_e4m3")


@pytest.mark.parametrize("groups", [ONE_GROUP, PageGroups(num_full=1, num_window=2, window=32)])
def test_the_size_of_the_cache_is_the_schedulers(tmp_path: Path, groups: PageGroups) -> None:
    """Gateways get it from EngineInfo before the first step, and then from the scheduler."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig.of(model=str(tmp_path), load_format="dummy")
    hello = Hello(0, 100, 256, 100, page_groups=groups, max_num_seqs=8, max_num_batched_tokens=32)
    info = build_engine_info(config, [hello], "salt")
    limited = config.with_limits(info.max_num_seqs, info.max_num_batched_tokens)
    cache = Scheduler(SchedulerConfig.of(limited, info), lambda: 0.0).state.cache
    assert info.num_blocks == cache.num_blocks == cache.num_allocatable


def test_limits_default_to_the_devices(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    hello = Hello(0, 9, 256, 100, max_num_seqs=256, max_num_batched_tokens=2048)

    def limits(**options: int) -> tuple[int, int]:
        config = EngineConfig.of(model=str(tmp_path), load_format="dummy", **options)
        info = build_engine_info(config, [hello], "salt")
        return info.max_num_seqs, info.max_num_batched_tokens

    assert limits() == (256, 2048)
    assert limits(max_num_seqs=5) == (5, 2048)


def test_end_tokens_are_those_of_all_files(tmp_path: Path) -> None:
    """config.json with its text_config, generation_config.json, and the tokenizer's files."""
    hello = Hello(0, 9, 256, 100)

    def ends(**options: str) -> list[int]:
        config = EngineConfig.of(model=str(tmp_path), load_format="dummy", **options)
        return build_engine_info(config, [hello], "salt").eos_token_ids

    def write(name: str, **content: object) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    write("config.json", **CONFIG)
    assert ends() == [2], "transformers' default"
    write("config.json", **CONFIG, eos_token_id=5)
    assert ends() == [5]
    write("generation_config.json", eos_token_id=[6, 5, 7])
    assert ends() == [5, 6, 7]
    write("tokenizer_config.json", eos_token="<|im_end|>")
    assert ends() == [5, 6, 7]
    added = [{"content": "<|im_end|>", "id": 9}, {"content": "<|beyond|>", "id": 100}]
    write("tokenizer.json", added_tokens=added, model={"vocab": {"a": 0}})
    assert ends() == [5, 6, 7, 9]
    write("tokenizer_config.json", eos_token="<|beyond|>")
    assert ends() == [5, 6, 7], "the model has 100 tokens"
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text())
    (other / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert ends(tokenizer=str(other)) == [5, 6, 7, 0]
    write("tokenizer.json", model=3)
    assert ends() == [5, 6, 7]
