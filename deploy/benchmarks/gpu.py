"""All GPU measurements in one run; if a step fails, the others still run.

    python -m deploy.benchmarks.gpu [--out FOLDER] [--peer VLLM] [STEP ...]

The steps are:

    - tests
    - kernels, relative to the device's peaks
    - decode and prefill of an 8B-sized model with random weights (bf16, FP8, INT4)
    - one request of 100k tokens
    - models with experts, recurrent states and MLA
    - the idle gap between steps
    - serving over HTTP, and vLLM for comparison if it is installed

FOLDER/gpu.json and FOLDER/gpu.md are rewritten after each step, so that an aborted run keeps its
results.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.cli.parser import CommandParser
from deploy.benchmarks.gpu_models import MODELS
from worker.rank.host_memory import count_gpus

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "deploy" / "models" / "demo"
"""Tokenizer for prompts; the weights are random."""
_SERVER_URL = "http://127.0.0.1:8100"
SERVERS_START_S = 900.0
_POLL_S = 1.0
_TAIL_CHARS = 2000
"""Number of trailing output characters to keep of a failed step."""
_KILL_S = 10.0
"""Seconds that a program has to exit before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A program that a step needs, and the URL that responds once it is ready."""

    command: Sequence[str]
    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One measurement: a command that runs to completion."""

    name: str
    command: Sequence[str]
    limit_s: float = 900.0
    """Seconds after which the step counts as hung and is killed."""
    servers: Sequence[Server] = ()
    is_json: bool = True
    """Whether the command prints its result as one JSON object."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command, in addition to those of this process."""


def make_steps(python: str, folder: Path, peer: str | None, num_gpus: int) -> list[Step]:
    """All steps, in the order in which they run.

    Args:
        python: Python interpreter that runs rayfleet.
        folder: folder for the models' configurations.
        peer: vLLM's executable; None skips the comparison.
        num_gpus: number of GPUs; tensor parallelism is measured if there are two or more.
    """
    bench, research = [python, "-m", "cluster.bench"], [python, "-m", "deploy.benchmarks"]
    cuda = ["--device", "cuda", "--json"]
    paths = {name: write_model(folder / name, config) for name, config in MODELS.items()}
    dense = paths["8b"]
    roofline = [*research, "roofline", *cuda]
    decode = [*roofline, "--running", "1,32,128,256"]
    long = ["--models", dense, "--running", "1", "--input-len", "100000"]
    quantized = ["--models", paths["8b-fp8"], paths["8b-int4"], "--running", "1,32,128"]
    products = ["--ops", _PRODUCTS, "--rows", "1,32,128,8192"]
    offline = [*bench, "throughput", *cuda, "--load-format", "dummy", "--disable-detokenize"]
    offline += ["--tokenizer", str(TOKENIZER), "--max-num-batched-tokens", "8192", "--model"]
    mixed = ["--input-len", "1024", "--output-len", "256", "--random-range-ratio", "0.5"]
    mixed += ["--num-prompts", "512", "--max-num-seqs", "256"]
    steps = [
        Step(name="tests", command=[python, "-m", "pytest", "-m", "gpu", "-q"], is_json=False),
        Step(name="kernels", command=[*research, "kernels", *cuda]),
        Step(name="products", command=[*research, "kernels", *cuda, *products]),
        Step(name="decode", command=decode),
        Step(name="decode-without-pdl", command=decode, environment={"RAYFLEET_DISABLE_PDL": "1"}),
        Step(name="decode-quantized", command=[*roofline, *quantized]),
        Step(name="decode-100k", command=[*roofline, *long]),
        *(_prefill(offline, paths, name, 8192, 32) for name in ("8b", "8b-fp8", "8b-int4")),
        *(
            Step(name=f"mixed-8b{name}", command=[*offline, dense, *mixed, *options])
            for name, options in _FORMATS.items()
        ),
    ]
    for name, options in (("", []), ("-eager", ["--enforce-eager"])):
        # Nearly every step mixes short prompts with decodes: shows the cost of kernel launches.
        short = ["--input-len", "256", "--output-len", "64", "--num-prompts", "512", *options]
        command = [*offline, paths["0.6b"], *short, "--max-num-seqs", "64"]
        steps.append(Step(name=f"mixed-0.6b{name}", command=command))
    for name, running in _DECODES:
        load = ["--input-len", "512", "--output-len", "128", "--num-prompts", str(2 * running)]
        command = [*offline, paths[name], *load, "--max-num-seqs", str(running)]
        steps.append(Step(name=f"{name}-{running}", command=command))
    steps.append(_prefill(offline, paths, "qwen3.5-9b", 1024, 64))
    steps.append(_prefill(offline, paths, "deepseek-v2-lite", 8192, 16))
    steps.append(_prefill(offline, paths, "8b", 8192, 32, "flash"))
    if num_gpus > 1:
        load = ["--input-len", "512", "--output-len", "128", "--num-prompts", "64"]
        command = [*offline, dense, *load, "--max-num-seqs", "32", "-tp", "2"]
        steps.append(Step(name="8b-tp2-32", command=command))
    steps.append(Step(name="overlap", command=[*research, "overlap", *cuda]))
    steps.append(Step(name="admission", command=[*research, "admission", *cuda]))
    steps += (_serve(python, dense, running) for running in (1, 32, 128))
    if peer is not None:
        steps.append(_beside_peer(python, dense, peer))
    return steps


_PRODUCTS = "linear,torch_linear,quantized_linear,fused_moe"
"""Ops of the step `products`."""
_FORMATS: Mapping[str, Sequence[str]] = {
    "": [],
    "-fp8-kv": ["--kv-cache-dtype", "fp8"],
    "-fp8": ["--quantization", "fp8"],
}
"""Options of the mixed load, keyed by the step's suffix: bf16, an FP8 KV cache, and weights that
are quantized on loading."""
_DECODES = (
    *(("30b-a3b", running) for running in (1, 32, 256)),
    *(("gpt-oss-20b", running) for running in (1, 32, 128)),
    *(("qwen3.5-9b", running) for running in (1, 32)),
    ("qwen3.5-35b-a3b-fp8", 32),
    ("deepseek-v2-lite", 32),
)
"""Models, and numbers of requests that decode concurrently after prompts of 512 tokens."""


def _prefill(
    offline: Sequence[str],
    paths: Mapping[str, str],
    name: str,
    length: int,
    count: int,
    backend: str = "",
) -> Step:
    """Step with `count` prompts of `length` tokens and one output token each. `backend` selects an
    attention backend other than the default."""
    load = ["--input-len", str(length), "--output-len", "1", "--num-prompts", str(count)]
    command = [*offline, paths[name], *load, "--no-enable-prefix-caching"]
    if not backend:
        return Step(name=f"prefill-{name}", command=command)
    return Step(
        name=f"prefill-{name}-{backend}", command=[*command, "--attention-backend", backend]
    )


def _serve(python: str, model: str, running: int) -> Step:
    """Step that sends load over HTTP to Ray Serve; no prompt is cached."""
    load = ["--input-len", "1024", "--output-len", "128", "--num-prompts", str(4 * running)]
    return Step(
        name=f"serve-8b-{running}",
        command=[
            *(python, "-m", "cluster.bench", "serve", "--json", "--base-url", _SERVER_URL, *load),
            *("--model", model, "--tokenizer", model, "--max-concurrency", str(running)),
            *("--ignore-eos", "--seed", str(running)),  # new prompts in each load
        ],
        servers=(_local_server(python, model, ["--load-format", "dummy"]),),
    )


def _local_server(python: str, model: str, options: Sequence[str]) -> Server:
    command = [python, "-m", "cluster.cli.main", "serve", model, *options]
    return Server(command=[*command, "--device", "cuda", "--port", "8100"], url=_SERVER_URL)


def write_model(folder: Path, config: Mapping[str, Any]) -> str:
    """Writes a model's config.json and a tokenizer; returns the folder."""
    folder.mkdir(parents=True)
    for file in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return str(folder)


def _beside_peer(python: str, model: str, peer: str) -> Step:
    """Step that compares rayfleet with vLLM. Both run at the same time, each on less than half of
    the device memory, and are measured in turn."""
    theirs, ours = "http://127.0.0.1:8101", _SERVER_URL
    share = [
        "--load-format",
        "dummy",
        "--gpu-memory-utilization",
        "0.42",
        "--max-model-len",
        "8192",
    ]
    return Step(
        name="peer",
        command=[
            *(python, "-m", "cluster.bench", "compare", theirs, ours, "--json", "--rounds", "3"),
            *("--model", model, "--tokenizer", model, "--concurrencies", "1,32,128"),
            *("--input-len", "1024", "--output-len", "128", "--prompts-per-stream", "4"),
        ],
        limit_s=3600.0,
        servers=(
            Server(command=[peer, "serve", model, *share, "--port", "8101"], url=theirs),
            _local_server(python, model, share),
        ),
    )


def run_steps(steps: Sequence[Step], out: Path) -> dict[str, Any]:
    """Runs all steps, even if some fail, and writes the results after each."""
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": describe_machine(), "steps": {}}
    for step in steps:
        print(f"{step.name} ...", file=sys.stderr, flush=True)
        report["steps"][step.name] = found = run_step(step)
        print(f"{step.name}: {found['status']}, {found['seconds']} s", file=sys.stderr, flush=True)
        _replace(out / "gpu.json", json.dumps(report, indent=1))
        _replace(out / "gpu.md", write_page(report))
    return report


def run_step(step: Step) -> dict[str, Any]:
    """Outcome of a step. Its status is ok, missed (a goal), failed or hung."""
    began = time.monotonic()
    settings = [f"{name}={value}" for name, value in step.environment.items()]
    found: dict[str, Any] = {"command": as_typed([*settings, *step.command])}
    try:
        with contextlib.ExitStack() as at_last:
            for server in step.servers:
                at_last.enter_context(_serving(server))
            found |= _measure(step)
    except subprocess.TimeoutExpired:
        found |= {"status": "hung", "error": f"killed after {step.limit_s:g} s"}
    except Exception as error:  # any error: the other steps still run
        found |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def as_typed(command: Sequence[str]) -> str:
    """A command as entered in the project's folder, without machine-specific paths."""
    words = ["python" if word == sys.executable else word for word in command]
    return " ".join(words).replace(f"{ROOT}/", "").replace(f"{tempfile.gettempdir()}/", "")


def _measure(step: Step) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as logged:
        with _running(step.command, printed, logged, step.environment) as process:
            code = process.wait(step.limit_s)
        printed.seek(0)
        logged.seek(0)
        text, log = printed.read(), logged.read()
    tail = {"tail": (log + ("" if step.is_json else text))[-_TAIL_CHARS:]}
    if not step.is_json:
        return {"status": "failed" if code else "ok", **tail}
    try:
        result = json.loads(text)
    except ValueError:
        return {"status": "failed", "error": f"no result, exit status {code}", **tail}
    missed = [check for check in result.get("checks", []) if not check["holds"]]
    return {"status": "missed" if missed else "failed" if code else "ok", "result": result}


@contextlib.contextmanager
def _serving(server: Server) -> Iterator[None]:
    """Context manager that starts a server, and is entered once the server is ready."""
    with tempfile.TemporaryFile("w+") as log, _running(server.command, log, log) as process:
        deadline = time.monotonic() + SERVERS_START_S
        while not _answers(server.url):
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise RuntimeError(f"{server.url} does not respond: {log.read()[-_TAIL_CHARS:]}")
            time.sleep(_POLL_S)
        yield


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _running(
    command: Sequence[str], out: Any, log: Any, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Context manager that runs a program in its own session; kills all its processes on exit."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)


def describe_machine() -> dict[str, str]:
    """Host, GPUs and versions."""
    machine = {"host": f"{platform.machine()}, {os.cpu_count()} cores", "python": sys.version}
    for name, command in (
        ("gpus", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]),
        ("commit", ["git", "rev-parse", "HEAD"]),
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            machine[name] = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=True
            ).stdout.strip()
    return machine


def write_page(report: Mapping[str, Any]) -> str:
    """Summary of a report in Markdown."""
    lines = ["# GPU results", ""]
    lines += [f"- {name}: {' / '.join(value.split())}" for name, value in report["machine"].items()]
    lines += ["", "| step | | seconds |", "|---|---|---|"]
    steps: Mapping[str, Mapping[str, Any]] = report["steps"]
    lines += [f"| {name} | {step['status']} | {step['seconds']} |" for name, step in steps.items()]
    for name, step in steps.items():
        lines += ["", f"## {name}", "", f"`{step['command']}`", ""]
        result = step.get("result", {})
        for check in result.get("checks", []):
            mark = "holds" if check["holds"] else "**missed**"
            lines.append(f"- {check['name']}: {check['value']:.4g} {check['unit']} "
                         f"({check['goal']}) {mark}")  # fmt: skip
        lines += [f"- {key}: {value}" for key, value in _figures(result)]
        if problem := step.get("error"):
            lines += [f"- {problem}"]
        if tail := step.get("tail"):
            lines += ["", "```", tail.strip(), "```"]
    return "\n".join([*lines, ""])


def _figures(result: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Numbers of a result with their paths; lists are skipped."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{path}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{key}", f"{value:.4g}"


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps. The exit status is 1 unless every step ran and met its goals."""
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("deploy/benchmarks/results"))
    parser.add_argument(
        "--peer",
        default=shutil.which("vllm"),
        help="vLLM's executable; default: vllm on PATH, if any",
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="steps to run; default: all")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        steps = make_steps(sys.executable, Path(folder), options.peer, count_gpus())
        if unknown := sorted(set(options.steps) - {step.name for step in steps}):
            parser.error(
                f"unknown steps {', '.join(unknown)}: "
                f"choose from {', '.join(step.name for step in steps)}"
            )
        selected = [step for step in steps if not options.steps or step.name in options.steps]
        report = run_steps(selected, options.out)
    print(options.out / "gpu.md")
    return int(any(step["status"] != "ok" for step in report["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
