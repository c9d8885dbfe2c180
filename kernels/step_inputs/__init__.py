"""Step inputs: writes to the tables on the device, and gathers of a step's tokens and pages."""

from __future__ import annotations

import torch

from kernels.registry import registry
from kernels.step_inputs import reference
from kernels.step_inputs.base import StepRows, StepTensors

_WRITE = registry.register(
    "write_table_rows_",
    reference.write_table_rows_,
    triton="kernels.step_inputs.triton_kernel:write_table_rows_",
)
_GATHER = registry.register(
    "gather_step_inputs",
    reference.gather_step_inputs,
    triton="kernels.step_inputs.triton_kernel:gather_step_inputs",
)


def write_table_rows_(
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    segments: torch.Tensor,
    values: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Copies segments of values to the token pool and the page table. No cell may be written twice.

    Args:
        token_pool: int32 [slots, positions].
        page_table: int32 [slots, pages].
        segments: int64 [n, 4]: 0 for the token pool or 1 for the page table; first cell of the flat
            table; index of the first value; number of values.
        values: int32: values of all segments.
        longest: maximum values of a segment.
    """
    _WRITE.select(token_pool)(token_pool, page_table, segments, values, longest)


def gather_step_inputs(
    token_pool: torch.Tensor, page_table: torch.Tensor, rows: StepRows
) -> StepTensors:
    """Gathers the inputs of a step, from the tables and three integers per row.

    Args:
        token_pool: int32 [slots, positions].
        page_table: int32 [slots, pages].
        rows: rows of the step.
    """
    device = rows.slots.device
    out = StepTensors.allocate(len(rows.slots), rows.num_tokens, rows.num_pages, device)
    _GATHER.select(token_pool)(token_pool, page_table, rows, out)
    return out


__all__ = ["StepRows", "StepTensors", "gather_step_inputs", "write_table_rows_"]
