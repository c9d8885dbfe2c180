"""Each rank reads only its slices; errors about wrong checkpoints name the tensors."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.dense import SPECS, VOCAB_SIZE, write_checkpoint
from tests.support.checkpoints.families import write_specimen
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.checkpoint import weight_files
from worker.models.config.model_config import load_model_config
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model, load_weights
from worker.models.loading.tensor_reader import TensorFile


def build(
    folder: Path, rank: int = 0, world_size: int = 1, dtype: torch.dtype = torch.float32
) -> DecoderModel:
    cpu = torch.device("cpu")
    # No process group: loading needs none.
    group = TensorParallelGroup(rank=rank, world_size=world_size, device=cpu, process_group=None)
    options = LayerOptions(group=group, dtype=dtype, device=cpu, batch_invariant=False)
    return build_model(load_model_config(str(folder)), options, 64)


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_slices_of_all_ranks_join_to_the_whole(tmp_path: Path, name: str, world_size: int) -> None:
    state = write_checkpoint(name, tmp_path).state_dict()
    parts: dict[str, list[WeightSlot]] = {}
    for rank in range(world_size):
        model = build(tmp_path, rank, world_size)
        slots = list(model.weight_slots())
        load_weights(model, model.config, show_progress=False)
        for slot in slots:
            parts.setdefault(slot.name, []).append(slot)
    for key, slots in parts.items():
        pieces = [slot.destination for slot in slots]
        for slot in slots:
            piece = slot.destination
            stop = slot.start + piece.shape[slot.dim]
            expected = state[key][slot.start : stop]
            if slot.dim == 1:
                expected = state[key][:, slot.start : stop]
            assert torch.equal(piece, expected), key
        is_copied = "norm" in key or key.endswith(("o_proj.bias", "down_proj.bias"))
        if not is_copied and not (world_size == 8 and (".k_proj" in key or ".v_proj" in key)):
            assert torch.equal(torch.cat(pieces, dim=slots[0].dim), state[key]), key


def test_only_the_slice_is_read(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    files = {name: TensorFile(path) for path in weight_files(tmp_path) for name in names_in(path)}
    for slot in build(tmp_path, 1, 2).weight_slots():
        blocks = files[slot.name].blocks(slot.name, slot)
        assert sum(block.num_bytes for block in blocks) == slot.destination.numel() * 4, slot.name


def names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_of_many_blocks_are_read_whole(
    tmp_path: Path, rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows per block: in place if types are equal, otherwise by the loader's thread."""
    write_checkpoint("llama", tmp_path)
    expected, own = (build(tmp_path, rank, 2, dtype) for _ in range(2))
    slots = [list(model.weight_slots()) for model in (expected, own)]
    load_weights(expected, expected.config, show_progress=False)
    monkeypatch.setattr("worker.models.loading.tensor_reader._BLOCK_BYTES", 1000)
    load_weights(own, own.config, show_progress=False)
    for one, other in zip(*slots, strict=True):
        assert torch.equal(one.destination, other.destination), one.name


def expert_rank(folder: Path, rank: int) -> DecoderModel:
    """One of two ranks that hold whole experts."""
    cpu = torch.device("cpu")
    group = TensorParallelGroup(rank=rank, world_size=2, device=cpu, process_group=None)
    options = LayerOptions(
        group=group, dtype=torch.float32, device=cpu, batch_invariant=False, expert_parallel=True
    )
    return build_model(load_model_config(str(folder)), options, 64)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt-oss", "llama4"])
def test_of_other_ranks_experts_nothing_is_read(tmp_path: Path, name: str) -> None:
    """Whether each is a tensor of its own, or all are in one."""
    write_specimen(name, tmp_path)
    files = {name: TensorFile(path) for path in weight_files(tmp_path) for name in names_in(path)}
    read = {
        rank: {
            slot.name: sum(block.num_bytes for block in files[slot.name].blocks(slot.name, slot))
            for slot in expert_rank(tmp_path, rank).weight_slots()
            if re.search(r"experts[.]", slot.name) and "shared" not in slot.name
        }
        for rank in range(2)
    }
    assert read[0].keys() == read[1].keys()
    sizes = [sum(sizes.values()) for sizes in read.values()]
    assert sizes[0] == sizes[1] > 0
    if name == "mixtral":
        for key, size in read[0].items():
            assert (size == 0) == (read[1][key] > 0), key


def test_experts_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    write_specimen("flex-olmo", tmp_path / "odd")
    with pytest.raises(ValueError, match=r"number of experts \(7\)\nremove --enable-expert"):
        expert_rank(tmp_path / "odd", 0)
    write_checkpoint("llama", tmp_path / "dense")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no experts: remove the flag"):
        expert_rank(tmp_path / "dense", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="where the peak of memory can be read")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_holds_the_model_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """Not the file as well, whether or not its values are converted."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000},
        **{**sizes, "intermediate_size": 8192, "num_hidden_layers": 1, "head_dim": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    ctypes.CDLL(None).malloc_trim(0)  # so that the model is loaded into untouched memory
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = memory_peak()
    model = build(tmp_path, dtype=dtype)
    num_values = write_zeros(tmp_path / "model.safetensors", model)
    assert 2 * num_values > 180e6
    model.process_after_loading = lambda: None  # type: ignore[method-assign]  # what is measured is the loader
    load_weights(model, model.config, show_progress=False)
    grown, size = memory_peak() - before, num_values * dtype.itemsize
    assert 0.8 * size < grown < size + 0.5 * 2 * num_values


def write_zeros(path: Path, model: DecoderModel) -> int:
    """A sparse bfloat16 file, if the file system supports that; returns its number of values."""
    header, place = {}, 0
    for slot in model.weight_slots():
        end = place + 2 * math.prod(slot.full_shape)
        shape, offsets = list(slot.full_shape), [place, end]
        header[slot.name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    return place // 2


def memory_peak() -> int:
    """Peak memory in bytes, including mapped files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_sharded_checkpoint_has_an_index(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_progress_is_logged_without_a_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint("qwen3", tmp_path)
    model = build(tmp_path)
    with caplog.at_level(logging.INFO):
        load_weights(model, model.config, show_progress=True)
    assert re.search(r"loading weights: 100 % of [\d.]+ MB, [\d.]+ GB/s", caplog.text)
    assert re.search(r"loaded [\d.]+ MB of weights in [\d.]+ s, [\d.]+ GB/s", caplog.text)


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are found in the headers, which are read quickly even for large checkpoints."""

    def fail(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("worker.models.loading.loader.TensorFile", fail)


@pytest.mark.usefixtures("no_weights_are_read")
def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["model.extra.weight"] = state.pop("model.norm.weight")
    save_file(state, path, metadata={"format": "pt"})
    model = build(tmp_path)
    with pytest.raises(ValueError, match=r"missing model\.norm\.weight; unexpected model\.extra"):
        load_weights(model, model.config, show_progress=False)


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_tensor_that_is_there_twice_is_named(tmp_path: Path) -> None:
    """It is undefined which of the two counts."""
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    path.rename(tmp_path / "a.safetensors")
    norm = {"model.norm.weight": torch.ones(64)}
    save_file(norm, tmp_path / "b.safetensors", metadata={"format": "pt"})
    model = build(tmp_path)
    with pytest.raises(ValueError, match=r"duplicate model\.norm\.weight"):
        load_weights(model, model.config, show_progress=False)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "glm4-moe-lite"])
def test_layers_that_predict_further_tokens_are_skipped(name: str, tmp_path: Path) -> None:
    """GLM-4.5 has one after its last layer; other numbers are invalid."""
    write_specimen(name, tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    for part in ("eh_proj.weight", "self_attn.q_proj.weight", "shared_head.head.weight"):
        state[f"model.layers.3.{part}"] = torch.ones(2, 2)
    save_file(state, path, metadata={"format": "pt"})
    model = build(tmp_path)
    load_weights(model, model.config, show_progress=False)
    state["model.layers.30.eh_proj.weight"] = torch.ones(2, 2)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.30\.eh_proj\.weight"):
        load_weights(build(tmp_path), model.config, show_progress=False)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "gemma4"])
def test_gemma_refuses_float16(name: str, tmp_path: Path) -> None:
    write_specimen(name, tmp_path)
    build(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="hidden states overflow"):
        build(tmp_path, dtype=torch.float16)


def test_the_text_of_a_wrapper_says_whether_it_is_tied(tmp_path: Path) -> None:
    """transformers, when saving Mistral Small 3.1, writes its own default next to the text
    model's."""
    write_specimen("mistral3", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    assert raw["text_config"]["tie_word_embeddings"] is False
    path.write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    model = build(tmp_path)
    assert "lm_head.weight" in {slot.name for slot in model.weight_slots()}
    load_weights(model, model.config, show_progress=False)
    del raw["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    assert load_model_config(str(tmp_path)).tie_word_embeddings


@pytest.mark.usefixtures("no_weights_are_read")
def test_wrong_shape_is_named(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"] = torch.ones(3)
    save_file(state, path, metadata={"format": "pt"})
    model = build(tmp_path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* \[3\], .* implies \[64\]"):
        load_weights(model, model.config, show_progress=False)


@pytest.mark.usefixtures("no_weights_are_read")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_type_that_needs_scales_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    state[name] = state[name].to(dtype)
    save_file(state, path, metadata={"format": "pt"})
    model = build(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} .* type (F8_E4M3|[IU]8)"):
        load_weights(model, model.config, show_progress=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_weight_may_be_there_twice_but_the_same(tmp_path: Path, rank: int) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, path, metadata={"format": "pt"})
    model = build(tmp_path, rank, 2)
    load_weights(model, model.config, show_progress=False)
    state["lm_head.weight"][[3, -3]] += 1.0
    save_file(state, path, metadata={"format": "pt"})
    model = build(tmp_path, rank, 2)
    with pytest.raises(ValueError, match="tie_word_embeddings is true"):
        load_weights(model, model.config, show_progress=False)


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        (3, r"3 does not divide the number of attention heads \(8\)"),
        (16, r"16 does not divide the number of attention heads \(8\)"),
    ],
)
def test_uneven_shares_are_refused(tmp_path: Path, world_size: int, message: str) -> None:
    write_checkpoint("qwen3", tmp_path)
    with pytest.raises(ValueError, match=message):
        build(tmp_path, 0, world_size)


def test_vocabulary_is_padded(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    model = build(tmp_path, 1, 2)
    assert model.embed_tokens.weight.shape[0] == (VOCAB_SIZE + 1) // 2
    load_weights(model, model.config, show_progress=False)
    assert (model.embed_tokens.weight[-1] == 0).all()
