"""What an engine says of itself."""

from __future__ import annotations

import json
from pathlib import Path

from worker.config import EngineConfig
from worker.core.info import begin_salt, build_engine_info
from worker.plan.messages import Hello

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
    """A cache in another type holds other keys and values of the same tokens."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(model=str(tmp_path), load_format="dummy")

    def salt(dtype: str) -> str:
        hello = Hello(rank=0, num_pages=9, max_model_len=256, vocab_size=100, dtype=dtype)
        return build_engine_info(config, [hello], begin_salt(config)()).block_hash_salt

    assert salt("bfloat16") == salt("bfloat16") != salt("float32")


def test_limits_are_the_devices_where_none_are_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    hello = Hello(0, 9, 256, 100, max_num_seqs=256, max_num_batched_tokens=2048)

    def limits(**options: int) -> tuple[int, int]:
        config = EngineConfig(model=str(tmp_path), load_format="dummy", **options)  # type: ignore[arg-type]
        info = build_engine_info(config, [hello], "salt")
        return info.max_num_seqs, info.max_num_batched_tokens

    assert limits() == (256, 2048)
    assert limits(max_num_seqs=5) == (5, 2048)
