"""CPU weights in oneDNN's blocked layout (the ops that torch's inductor freezing uses)."""

from __future__ import annotations

import torch

from kernels.linear.base import PackedLinear

# The layout that oneDNN chooses for this many rows served every row count from 2 on equally well.
_LAYOUT_ROWS = 32
# Weights up to this size also keep their plain form for single rows: below it a call is mostly
# dispatch, and the plain product dispatches in a third of the time.
_KEEP_PLAIN_BYTES = 2 << 20
# Largest product that the invariance of rows was tested for; longer inputs go in pieces.
_MAX_INVARIANT_ROWS = 512


def is_available(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN and the two packed-linear ops, for weights of `dtype`.

    bf16 needs a processor with AVX-512 at least; others convert, and gain nothing.
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
    """oneDNN's blocked copy of a weight; small fp32 ones keep the plain tensor for single rows.

    In bf16 the blocked product was the faster one at every row count.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = _reorder(weight)
        is_small = weight.numel() * weight.element_size() <= _KEEP_PLAIN_BYTES
        keep_plain = is_small and weight.dtype == torch.float32
        self._plain = weight if keep_plain else None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One product; a single row of a small weight in plain form."""
        if x.shape[0] == 1 and self._plain is not None:
            return torch.nn.functional.linear(x, self._plain, bias)
        return _product(x, self._packed, bias)


class InvariantOnednnWeight(PackedLinear):
    """The blocked copy, used only with row counts for which oneDNN adds up rows alike.

    A single row takes another kernel (a matrix-vector product), so it is padded to two. Whether
    that holds on this processor is checked by `rows_agree`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = _reorder(weight)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One product per 512 rows, never of a single row."""
        rows = x.shape[0]
        if rows == 1:
            return _product(torch.cat((x, x)), self._packed, bias)[:1]
        if rows <= _MAX_INVARIANT_ROWS:
            return _product(x, self._packed, bias)
        # tensor_split leaves no piece of a single row.
        pieces = torch.tensor_split(x, -(-rows // _MAX_INVARIANT_ROWS))
        return torch.cat([_product(piece, self._packed, bias) for piece in pieces])

    def rows_agree(self) -> bool:
        """Compare row counts around likely block sizes with one larger product, bitwise."""
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
