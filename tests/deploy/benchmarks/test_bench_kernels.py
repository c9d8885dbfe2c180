"""The kernel benchmark on CPU: every op is measured, and its arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

from deploy.benchmarks.cli import main
from deploy.benchmarks.kernels.case import Case, unsupported_ops
from deploy.benchmarks.kernels.cases import OTHER_OPS
from deploy.benchmarks.kernels.options import KernelOptions
from deploy.benchmarks.kernels.run import Peaks, _figures
from kernels import registry


def test_every_op_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    argv = ["kernels", "--device", "cpu", "--rows", "2", "--context", "32", "--seconds", "0.001"]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in result["rows"]} == {*registry, *OTHER_OPS}
    assert all(row["us"] > 0.0 and row["percent_of_peak"] > 0.0 for row in result["rows"])
    assert all(peak > 0.0 for peak in result["peaks"].values())
    assert all(check["holds"] for check in result["checks"])


def test_an_op_is_held_against_what_bounds_it() -> None:
    peaks = Peaks(copy_gb_s=100.0, read_gb_s=80.0, matmul_tflop_s=2.0)
    streaming = Case(op="x", shape="", run=lambda: None, num_bytes=5e6, num_flops=1e6)
    figures = _figures(streaming, 100.0, peaks)
    assert (figures["limit"], figures["gb_s"]) == ("memory", pytest.approx(50.0))
    assert figures["percent_of_peak"] == pytest.approx(50.0)
    product = Case(op="x", shape="", run=lambda: None, num_bytes=1e3, num_flops=1e8)
    figures = _figures(product, 200.0, peaks)
    assert (figures["limit"], figures["tflop_s"]) == ("compute", pytest.approx(0.5))
    assert figures["percent_of_peak"] == pytest.approx(25.0)


def test_ops_that_a_gpu_lacks_instructions_for_are_skipped() -> None:
    assert unsupported_ops((8, 0)) == dict.fromkeys(
        ("quantize_fp8", "fused_add_norm_fp8", "activate_fp8"),
        "needs compute capability 8.9, this GPU has 8.0",
    )
    assert not any(map(unsupported_ops, [(8, 9), (9, 0), (10, 0), None]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": (1, 0)}, "--rows"),
        ({"context": -1}, "--context"),
        ({"seconds": 0.0}, "--seconds"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelOptions(**options)  # type: ignore[arg-type]  # test options


def test_an_unknown_op_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--device", "cpu", "--ops", "rms_norm,softmax"]) == 2
    assert "unknown ops softmax" in capsys.readouterr().err
