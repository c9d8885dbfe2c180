"""The compiled library runs the families that opted in, and no class derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.native import WeightMemory
from tests.support.checkpoints.dense import write_checkpoint
from worker.models.architectures.llama import LlamaForCausalLM
from worker.models.config.model_config import load_model_config
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.native import NativeOptions, build_native


class Doubling(LlamaForCausalLM):
    """A topology that differs from Llama's, whose layers the library would not see."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return 2.0 * super().forward(input_ids, positions, ctx)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Doubling])
def test_a_derived_class_is_left_to_torch(tmp_path: Path, kind: type[LlamaForCausalLM]) -> None:
    write_checkpoint("llama", tmp_path)
    cpu = torch.device("cpu")
    options = LayerOptions(
        group=TensorParallelGroup.alone(cpu), dtype=torch.float32, device=cpu, batch_invariant=False
    )
    model = kind(load_model_config(str(tmp_path)), options, 64)
    native = NativeOptions(page_size=16, num_threads=1, required=False)
    assert (build_native(model, native, WeightMemory()) is not None) == (kind is LlamaForCausalLM)
    if kind is Doubling:
        required = NativeOptions(page_size=16, num_threads=1, required=True)
        with pytest.raises(ValueError, match=r"--cpu-backend native .*Doubling"):
            build_native(model, required, WeightMemory())
