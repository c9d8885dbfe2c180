"""The roofline benchmark on a tiny model of random weights, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.benchmarks.cli import main
from deploy.benchmarks.kernels.roofline import step_bytes
from deploy.benchmarks.kernels.shapes import SHAPES, write_shape
from tests.support.engines.forked_rank import forking_ranks
from worker.models.config.model_config import load_model_config


def test_random_weights_decode_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {
        **SHAPES["qwen3-0.6b"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    engine = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "4096")
    load = ("--running", "1,2", "--turns", "1", "--steps", "4", "--input-len", "8")
    with forking_ranks():
        assert main(["roofline", "--models", str(tmp_path), *engine, *load, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    cells = result["models"][str(tmp_path)]
    for running in (1, 2):
        cell = cells[str(running)]
        expected = cell["roofline_us"] / cell["wall_us"] * 100
        assert cell["percent_of_roofline"] == pytest.approx(expected)
        assert cell["tokens_per_second"] * cell["wall_us"] == pytest.approx(running * 1e6)
    # 10 tokens of 2 layers, 2 heads, 16 values: 1280 numbers more for keys and values.
    peak = max(result["peaks"]["copy_gb_s"], result["peaks"]["read_gb_s"])
    more = (cells["2"]["roofline_us"] - cells["1"]["roofline_us"]) * peak * 1e3
    assert more == pytest.approx(10 * 2 * 2 * 2 * 16 * 4)
    assert result["checks"] == [], "goals are a GPU's"


def test_a_step_reads_all_weights_but_the_embedding(tmp_path: Path) -> None:
    model = load_model_config(write_shape("qwen3-8b", str(tmp_path)), weights=False)
    alone = step_bytes(model, running=1, context=0, value_bytes=2)
    assert alone == pytest.approx(2 * (8.19e9 - 151936 * 4096), rel=0.002)
    both = step_bytes(model, running=1, context=0, value_bytes=2, ranks=2)
    assert both == alone / 2
    cached = step_bytes(model, running=3, context=100, value_bytes=2) - alone
    assert cached == 3 * 100 * 147456
    small = load_model_config(write_shape("qwen3-0.6b", str(tmp_path)), weights=False)
    assert step_bytes(small, running=1, context=0, value_bytes=1) == pytest.approx(
        0.596e9, rel=0.01
    )
