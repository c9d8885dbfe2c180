from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels import OpRegistry, registry


def test_every_op_has_a_triton_kernel() -> None:
    assert set(registry) == {
        "rms_norm",
        "rms_norm_pair",
        "fused_add_norm",
        "qk_norm_rope_store",
        "silu_and_mul",
        "gelu_and_mul",
        "clamped_swiglu",
        "squared_relu",
        "xielu",
        "soft_cap_",
        "prepare_latents",
        "gumbel_noise",
        "sample_tokens",
        "apply_token_bitmask",
        "apply_penalties_",
        "count_tokens_",
        "apply_token_edits_",
        "token_scores",
        "write_table_rows_",
        "gather_step_inputs",
        "choose_experts",
        "fused_moe",
        "gated_delta_net",
        "selective_scan",
        "short_convolution",
        "draft_ngrams",
    }
    assert all(registry[name].has_triton for name in registry)


def test_importing_and_running_on_cpu_loads_no_triton() -> None:
    script = (
        "import sys, torch, kernels\n"
        "before = 'triton' in sys.modules\n"
        "kernels.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)\n"
        "kernels.silu_and_mul(torch.ones(2, 4))\n"
        "loaded = [m for m in sys.modules if m.startswith('kernels') and 'triton_' in m]\n"
        "assert not before and 'triton' not in sys.modules and not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_backend_selects_the_implementation() -> None:
    own = OpRegistry()
    op = own.register("double", lambda x: x * 2, triton="operator:neg")
    x = torch.ones(1)
    assert op.select(x)(x).item() == 2
    with own.using("triton"):
        assert op.select(x)(x).item() == -1
    assert own.backend == "auto"
    plain = own.register("triple", lambda x: x * 3)
    with own.using("triton"):
        assert plain.select(x)(x).item() == 3


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kernel backend"):
        OpRegistry().set_backend("cuda")  # type: ignore[arg-type]
