"""Findings of `rayfleet doctor`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from cluster.cli import checks, doctor
from cluster.cli.checks import GIB, Finding, Gpu
from cluster.cli.main import build_parser
from cluster.cli.options import given_options
from cluster.config import find_demo_model
from tests.support.checkpoints.adapters import write_adapter
from tests.support.effort import IS_LONG
from tests.support.worker.real_configs import load_corpus, verdict
from worker.config import EngineConfig
from worker.models.config.model_config import load_model_config
from worker.models.loading.loader import build_without_weights
from worker.rank.host_memory import MemoryBound

pytestmark = pytest.mark.randomized  # with all configurations

H100 = Gpu("NVIDIA H100", 80 * GIB)
L4 = Gpu("NVIDIA L4", 24 * GIB)


def requirements(triton: str | None) -> list[Finding]:
    """Findings for the public torch with a version of Triton."""
    lines = ["triton==3.7.1; platform_system == 'Linux'", "sympy>=1.13", "optree; extra == 'x'"]
    installed = {"torch": "2.13.0", "sympy": "1.14.0"} | ({"triton": triton} if triton else {})
    return list(checks.check_requirements({"torch": lines}, installed))


def test_incompatible_requirements_are_reported() -> None:
    assert [finding.verdict for finding in requirements("3.7.1")] == ["ok"]
    (other,) = requirements("3.9.0")
    assert other.verdict == "bad"
    assert "torch 2.13.0 requires triton==3.7.1, but 3.9.0 is installed" in other.text
    assert "pip install 'triton==3.7.1'" in other.text
    (missing,) = requirements(None)
    assert missing.verdict == "bad"
    assert "it is not installed" in missing.text


def test_this_environment_is_complete() -> None:
    assert [finding.verdict for finding in doctor.check_requirements()] == ["ok"]


@pytest.mark.parametrize(
    ("built_for", "driver", "verdict", "words"),
    [
        ("13.0", "580.95.05", "ok", "driver 580.95.05"),
        ("13.0", "610.10", "ok", "driver 610.10"),
        ("13.0", "575.57.08", "bad", "needs 580 or newer"),
        ("12.8", "550.54.14", "ok", "CUDA 12.8"),
        ("12.8", "470.82.01", "bad", "needs 525 or newer"),
        ("13.0", None, "note", "--gpus all"),
        (None, "580.95.05", "note", "torch is a CPU build"),
        (None, None, "note", "run on the CPU"),
        ("14.0", "700.1", "note", "CUDA 14.0"),
    ],
)
def test_the_driver_is_compared_with_the_build_of_torch(
    built_for: str | None, driver: str | None, verdict: str, words: str
) -> None:
    finding = checks.check_driver(built_for, driver)
    assert finding.verdict == verdict
    assert words in finding.text


def weights(gib: float, *gpus: Gpu, ranks: int = 1) -> Finding:
    return checks.check_weights(
        int(gib * GIB),
        gpus,
        tensor_parallel_size=ranks,
        gpu_memory_utilization=0.9,
        available_bytes=16 * GIB,
    )


def test_weights_are_compared_with_gpu_memory() -> None:
    fits = weights(15, H100)
    assert fits.verdict == "ok"
    assert "leaves 57.0 GiB for the KV cache" in fits.text
    large = weights(131, H100, H100)
    assert large.verdict == "bad"
    assert "--tensor-parallel-size 2 or more" in large.text
    assert weights(131, H100, H100, ranks=2).verdict == "ok"
    assert weights(30, H100, L4).verdict == "bad", "the smallest decides"
    few = weights(131, H100, ranks=2)
    assert few.verdict == "bad"
    assert "this machine has 1" in few.text


def test_weights_are_compared_with_available_memory_without_gpus() -> None:
    assert weights(15).verdict == "ok"
    assert weights(17).verdict == "bad"


def test_limits_of_the_machine() -> None:
    assert checks.check_shared_memory(2 * GIB, 2).verdict == "ok"
    docker = checks.check_shared_memory(64 << 20, 2)
    assert docker.verdict == "bad"
    assert "--shm-size=1g" in docker.text
    assert checks.check_shared_memory(64 << 20, 0).verdict == "note"
    assert checks.check_open_files(1024, 1 << 20).verdict == "ok", "Ray raises it"
    assert checks.check_open_files(65536, 65536).verdict == "ok"
    few = checks.check_open_files(1024, 1024)
    assert few.verdict == "note"
    assert "about 512 concurrent clients" in few.text


def test_what_triton_compiles_with_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first kernel, Triton would fail with a compiler's message instead."""
    (found,) = doctor.check_launchers([H100])
    assert found.verdict == "ok"
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path / name))
    (found,) = doctor.check_launchers([H100])
    assert found.verdict == "bad"
    assert f"{tmp_path}/include/Python.h (apt install python3-dev" in found.text
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (found,) = doctor.check_launchers([])
    assert found.verdict == "note", "models run on the CPU"
    assert "a C compiler (apt install gcc, or set CC) and " in found.text
    monkeypatch.setenv("CC", "tcc")
    assert "compiler" not in next(doctor.check_launchers([])).text


def test_default_host_memory_for_offloading_is_reported() -> None:
    node = MemoryBound("this node", 1000 * GIB, 900 * GIB)
    found = checks.check_offloading(node, [H100], 8)
    assert found.verdict == "ok"
    assert "up to 50.0 GiB of host memory per GPU" in found.text
    pod = MemoryBound("the cgroup", 64 * GIB, 40 * GIB)
    found = checks.check_offloading(pod, [H100], 8)
    assert found.verdict == "note"
    assert "40.0 of 64.0 GiB of the cgroup are free" in found.text


def test_disk_space_is_checked() -> None:
    def disk(free: int, needed: int = 0) -> Finding:
        return checks.check_disk(
            "/models", free_bytes=free * GIB, total_bytes=100 * GIB, needed_bytes=needed * GIB
        )

    assert disk(20).verdict == "ok"
    assert disk(20, needed=30).verdict == "bad"
    assert "HF_HOME" in disk(20, needed=30).text
    assert disk(4).verdict == "bad"
    assert "5% that Ray requires" in disk(4).text


def test_versions_of_a_cluster_are_compared() -> None:
    ours = {"ray": "2.60.0", "python": "3.11.7"}
    assert checks.check_cluster("h:6379", ours, ours).verdict == "ok"
    older = checks.check_cluster("h:6379", {**ours, "ray": "2.59.0"}, ours)
    assert older.verdict == "bad"
    assert "ray 2.59.0 instead of 2.60.0" in older.text
    assert "python" not in older.text.split("must")[0]
    silent = checks.check_cluster("h:6379", {"problem": "nothing answers"}, ours)
    assert silent == Finding("bad", "cannot connect to a Ray cluster at h:6379: nothing answers")


def test_a_missing_cluster_is_reported() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        found = doctor.read_cluster(f"127.0.0.1:{bound.getsockname()[1]}")
    assert "cannot connect to" in found["problem"]


def test_elements_are_counted_from_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.int8)}, tmp_path / "1.safetensors"
    )
    save_file({"c": np.zeros((2, 2), np.float32)}, tmp_path / "2.safetensors")
    assert doctor.read_elements(str(tmp_path)) == {"F32": 19, "I8": 7}
    assert [doctor.width(kind) for kind in ("F32", "BF16", "F8_E4M3", "I64", "BOOL")] == [
        4,
        2,
        1,
        8,
        1,
    ]
    assert [doctor.width(kind, 2) for kind in ("F32", "BF16", "F8_E4M3")] == [2, 2, 1]


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch detects no GPU if the driver is too old."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nprintf '550.54.14, 81559, 9.0, NVIDIA H100 80GB HBM3\\n%.0s' 1 2\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus, driver = doctor.read_gpus()
    assert gpus == [Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, (9, 0))] * 2
    assert driver == "550.54.14"


def test_unsupported_gpus_are_reported() -> None:
    t4 = checks.check_gpu(0, Gpu("Tesla T4", 16 * GIB, (7, 5)))
    assert t4.verdict == "bad"
    assert (
        t4.text == "GPU 0: Tesla T4, 16 GiB: compute capability 7.5 is not supported: 8.0 or "
        "higher is required"
    )
    assert checks.check_gpu(1, Gpu("NVIDIA A100", 80 * GIB, (8, 0))).verdict == "ok"
    assert checks.check_gpu(1, H100).verdict == "ok"


def findings(*arguments: str) -> list[Finding]:
    """Findings of `rayfleet doctor --model`."""
    namespace = build_parser().parse_args(["doctor", *arguments])
    engine = EngineConfig.of(**given_options(namespace, EngineConfig))
    return list(doctor.check_model(engine, []))


def changed_demo(folder: Path, *, config: dict[str, object], without: str = "") -> str:
    """Copy of the demo model with changes in config.json, and without one file."""
    for path in Path(find_demo_model()).iterdir():
        if path.name != without:
            (folder / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def test_a_model_that_loads_is_ok() -> None:
    loading, memory = findings("--model", find_demo_model(), "-tp", "2", "--max-model-len", "512")
    assert loading.verdict == memory.verdict == "ok"
    assert "Qwen3ForCausalLM, up to 512 tokens" in loading.text


@pytest.mark.parametrize(
    ("config", "without", "flags", "problem"),
    [
        ({}, "", "-tp 3", "does not divide the number of attention heads"),
        ({}, "", "--max-model-len 5000", "exceeds this checkpoint's maximum of 4096"),
        ({"num_attention_heads": 16}, "", "", "has shape"),
        ({"num_hidden_layers": 7, "layer_types": None}, "", "", "missing model.layers.6."),
        ({"num_hidden_layers": 5, "layer_types": None}, "", "", "unexpected model.layers.5."),
        ({"attention_bias": True}, "", "", "missing model.layers.0.self_attn.k_proj.bias"),
        ({"architectures": ["Odd"], "model_type": "odd"}, "", "", "architectures"),
        ({"hidden_act": "tanh"}, "", "", "hidden_act"),
        ({}, "tokenizer.json", "", "no tokenizer.json"),
        ({}, "model.safetensors", "", "has no *.safetensors file"),
    ],
)
def test_an_unsupported_model_is_bad(
    config: dict[str, object], without: str, flags: str, problem: str, tmp_path: Path
) -> None:
    folder = changed_demo(tmp_path, config=config, without=without)
    finding = findings("--model", folder, *flags.split())[-1]
    assert finding.verdict == "bad"
    assert problem in finding.text


def test_a_draft_model_is_checked_too(tmp_path: Path) -> None:
    flags = ("--speculative-method", "draft", "--speculative-model")
    demo = find_demo_model()
    assert findings("--model", demo, *flags, demo)[0].verdict == "ok"
    folder = changed_demo(tmp_path, config={"attention_bias": True})
    finding = findings("--model", demo, *flags, folder)[-1]
    assert finding.verdict == "bad"
    assert "missing model.layers.0.self_attn.k_proj.bias" in finding.text


def test_adapters_are_checked(tmp_path: Path) -> None:
    base = Path(find_demo_model())
    good = write_adapter(base, tmp_path / "good", 2)
    other = write_adapter(base, tmp_path / "other", 32)
    modules = (f"good={good}", f"large={other}", f"none={tmp_path}")
    flags = ("--enable-lora", "--lora-modules", *modules)
    found = findings("--model", str(base), *flags)
    verdicts = [(one.verdict, one.text) for one in found if "adapter" in one.text]
    assert [verdict for verdict, _ in verdicts] == ["ok", "bad", "bad"]
    assert "LoRA adapter good fits the model" in verdicts[0][1]
    assert "--lora-modules: large: rank 32" in verdicts[1][1]
    assert "--lora-modules: none: " in verdicts[2][1]


def test_before_weights_are_downloaded_their_index_is_checked(tmp_path: Path) -> None:
    folder = changed_demo(tmp_path, config={}, without="model.safetensors")
    engine = EngineConfig.of(model=folder)
    assert "downloaded yet, so they were not checked" in doctor.check_loading(engine).text
    with safe_open(Path(find_demo_model()) / "model.safetensors", framework="np") as file:
        weight_map = dict.fromkeys(file.offset_keys(), "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    finding = doctor.check_loading(engine)
    assert finding.verdict == "note"
    assert "only the names of tensors were checked" in finding.text
    del weight_map["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"missing model\.norm\.weight"):
        doctor.check_loading(engine)


EVERY_REFUSED, EVERY_ACCEPTED = (1, 1) if IS_LONG else (3, 40)
"""Every n-th rejected and every n-th accepted configuration is tested."""


def test_the_verdict_is_the_loaders_on_every_real_configuration(tmp_path: Path) -> None:
    """With random weights, since the collection has none: whether the model can be built."""
    corpus = load_corpus()
    refused = [real for real in corpus if "refused" in verdict(real)][::EVERY_REFUSED]
    accepted = [real for real in corpus if "refused" not in verdict(real)][::EVERY_ACCEPTED]
    assert len(refused) > 20 // EVERY_REFUSED
    tokenizer = (Path(find_demo_model()) / "tokenizer.json").read_bytes()
    for number, real in enumerate([*refused, *accepted]):
        folder = tmp_path / str(number)
        folder.mkdir()
        real.write(folder)
        (folder / "tokenizer.json").write_bytes(tokenizer)
        # A multiple of the block size of every block-diffusion model.
        flags = ("--load-format", "dummy", "--page-size", "64")
        found = findings("--model", str(folder), *flags)[-1]
        problem = problem_of_loading(folder)
        assert found.verdict == ("bad" if problem else "ok"), (real.name, found.text)
        assert not problem or problem == " ".join(found.text.split())


def problem_of_loading(folder: Path) -> str:
    """Error of the loader; empty if it builds the model."""
    try:
        build_without_weights(load_model_config(str(folder), weights=False), 1)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def test_a_malformed_tokenizer_is_bad(tmp_path: Path) -> None:
    folder = changed_demo(tmp_path, config={}, without="tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    (finding,) = findings("--model", folder)
    assert finding.verdict == "bad"
    assert "cannot load the tokenizer" in finding.text


def test_the_exit_status_is_1_if_a_check_fails(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", "doctor", "--model", "./nothing"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert all(line[:6] in ("  ok  ", "note  ", " bad  ") for line in lines)
    assert any("package `kernels` is not shadowed" in line for line in lines)
    assert lines[-1].startswith(" bad  folder ./nothing does not exist: use a folder")
