"""CPU weights in oneDNN's blocked layout, with the ops that torch's inductor uses for freezing."""

from __future__ import annotations

import torch

from kernels.linear.base import PackedLinear

# Number of rows for which oneDNN selects the layout; it was as fast for any other number of 2 or
# more.
_LAYOUT_ROWS = 32
# Weights up to this size are also kept unpacked, for single rows: their matmuls are dominated by
# dispatch, which takes a third of the time for an unpacked weight.
_KEEP_PLAIN_BYTES = 2 << 20
# Maximum rows of a matmul for which invariance was tested; longer inputs are split.
_MAX_INVARIANT_ROWS = 512


def is_available(dtype: torch.dtype) -> bool:
    """Whether torch has oneDNN and its two ops for packed weights of `dtype`.

    bf16 needs a processor with AVX-512; other processors would convert to fp32, and gain nothing.
    """
    if not (
        torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class OnednnWeight(PackedLinear):
    """A weight in oneDNN's blocked layout; small fp32 ones are also kept unpacked for single rows.

    In bf16, the blocked layout was faster for any number of rows.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = _reorder(weight)
        is_small = weight.numel() * weight.element_size() <= _KEEP_PLAIN_BYTES
        keep_plain = is_small and weight.dtype == torch.float32
        self._plain = weight if keep_plain else None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes one matmul; for a single row, with the unpacked weight if it is kept."""
        if x.shape[0] == 1 and self._plain is not None:
            return torch.nn.functional.linear(x, self._plain, bias)
        return _product(x, self._packed, bias)


class InvariantOnednnWeight(PackedLinear):
    """A weight in oneDNN's blocked layout, with batch-invariant matmuls.

    oneDNN runs another kernel for a single row (GEMV), so single rows are padded to two.
    `rows_agree` checks whether matmuls of other numbers of rows agree on this processor.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = _reorder(weight)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes matmuls of 2 to 512 rows each."""
        rows = x.shape[0]
        if rows == 1:
            return _product(torch.cat((x, x)), self._packed, bias)[:1]
        if rows <= _MAX_INVARIANT_ROWS:
            return _product(x, self._packed, bias)
        # tensor_split leaves no piece with a single row.
        pieces = torch.tensor_split(x, -(-rows // _MAX_INVARIANT_ROWS))
        return torch.cat([_product(piece, self._packed, bias) for piece in pieces])

    def rows_agree(self) -> bool:
        """Whether matmuls of several numbers of rows, around likely block sizes, are bitwise equal
        to the same rows of a larger matmul."""
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(67, self.in_features, generator=generator)
        whole = self.multiply(probe, None)
        for rows in (1, 2, 3, 5, 8, 13, 16, 31, 48, 65):
            start = probe.shape[0] - rows
            if not torch.equal(self.multiply(probe[start:], None), whole[start:]):
                return False
        return True


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.detach().contiguous(), _LAYOUT_ROWS
    )
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result
