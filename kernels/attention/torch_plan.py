"""Plans of torch attention, one per step: pages to gather, rows to batch, positions to mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.base import AttentionMetadata, window_start

# Rows form a group if padding them to the longest row at most doubles their pages.
_MAX_PADDING = 2
# Maximum number of tokens of a group: its keys and values should stay in the last-level cache.
_MAX_GROUP_TOKENS = 8192
# Maximum number of elements of a causal mask; longer extends are split into chunks of queries.
_MAX_MASK_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length, computed in one call."""

    rows: torch.Tensor | None
    """[n]: indices of the rows in the batch; None if the group is the whole batch in order."""
    num_rows: int
    pages: torch.Tensor
    """[n * pages per row] int64: page ids."""
    length: int
    """Length of the longest row."""
    mask: torch.Tensor | None
    """fp32 [n, 1, 1, length], 0 or -inf; None if no position is masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtendPiece:
    """Chunk of consecutive queries of one row, which are computed in one call."""

    query_start: int
    query_stop: int
    pages: torch.Tensor
    """[ceil(length / page_size)] int64: page ids."""
    length: int
    """Number of positions on `pages`, up to the last one that a query attends to."""
    is_causal: bool
    """Whether queries and keys begin at the same position, so that no mask tensor is needed."""
    mask: torch.Tensor | None
    """fp32 [queries, length], 0 or -inf; None if `is_causal`, or if no position is masked."""


def plan_decode_groups(metadata: AttentionMetadata) -> tuple[DecodeGroup, ...]:
    """Plans decodes in groups by length. A row of length 0 reads one position, so that its result
    is finite.

    With a window, rows begin with the page of the first position that they attend to.
    """
    page_table, page_size = metadata.page_table, metadata.page_size
    seq_lens = metadata.seq_lens
    lengths = [max(1, length) for length in metadata.seq_lens_host]
    num_hidden = [0] * len(lengths)
    if metadata.window:
        starts = [metadata.first_visible(length - 1) for length in lengths]
        first_pages = [start // page_size for start in starts]
        num_hidden = [start % page_size for start in starts]
        lengths = [n - page_size * first for n, first in zip(lengths, first_pages, strict=True)]
        page_table = _cut_rows(page_table, first_pages, -(-max(lengths, default=0) // page_size))
        seq_lens = torch.tensor(lengths, device=page_table.device)
    groups = []
    for rows in _group_by_length(lengths, page_size):
        longest = max(lengths[row] for row in rows)
        columns = -(-longest // page_size)
        whole = rows == list(range(len(lengths)))
        index = None if whole else torch.tensor(rows, device=page_table.device)
        table = page_table if index is None else page_table.index_select(0, index)
        mask = None
        begins_hidden = any(num_hidden[row] for row in rows)
        if begins_hidden or any(lengths[row] != longest for row in rows):
            visible = seq_lens if index is None else seq_lens.index_select(0, index)
            visible = visible.clamp(min=1).view(-1, 1, 1, 1)
            positions = torch.arange(longest, dtype=torch.int32, device=page_table.device)
            mask = causal_mask(positions, visible)
            if begins_hidden:
                hidden = torch.tensor([num_hidden[row] for row in rows], device=page_table.device)
                mask.masked_fill_(positions < hidden.view(-1, 1, 1, 1), float("-inf"))
        groups.append(
            DecodeGroup(
                rows=index,
                num_rows=len(rows),
                pages=table[:, :columns].flatten().long(),
                length=longest,
                mask=mask,
            )
        )
    return tuple(groups)


def _cut_rows(page_table: torch.Tensor, first_pages: list[int], width: int) -> torch.Tensor:
    """`width` page ids of each row, starting at its entry of `first_pages`. Past the table's end,
    the last column is repeated."""
    first = torch.tensor(first_pages, device=page_table.device).view(-1, 1)
    columns = first + torch.arange(width, device=page_table.device)
    return page_table.gather(1, columns.clamp_(max=page_table.shape[1] - 1))


def _group_by_length(lengths: list[int], page_size: int) -> list[list[int]]:
    columns = [-(-length // page_size) for length in lengths]
    longest = max(columns, default=0)
    if len(lengths) * longest <= _MAX_PADDING * sum(columns) and (
        len(lengths) * longest * page_size <= _MAX_GROUP_TOKENS
    ):
        return [list(range(len(lengths)))] if lengths else []
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -columns[row]):
        current = groups[-1] if groups else []
        widest = columns[current[0]] if current else 0
        fits = (len(current) + 1) * widest * page_size <= _MAX_GROUP_TOKENS
        if current and fits and _MAX_PADDING * columns[row] >= widest:
            current.append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def plan_extend_pieces(metadata: AttentionMetadata) -> tuple[ExtendPiece, ...]:
    """Plans extends: one chunk of queries per row, or several if the row's mask would be large.

    With a window, a chunk's keys begin with the page of the first position that any of its queries
    attends to.
    """
    page_table, page_size = metadata.page_table, metadata.page_size
    block_size, window = metadata.block_size, metadata.window
    is_bidirectional = metadata.is_bidirectional
    pieces = []
    row_start = 0
    lengths = zip(metadata.seq_lens_host, metadata.query_lens_host, strict=True)
    for row, (seq_len, query_len) in enumerate(lengths):
        prefix = seq_len - query_len
        is_windowed = 0 < window < seq_len
        most_keys = min(seq_len, 2 * (window + page_size)) if is_windowed else seq_len
        is_causal = prefix == 0 and block_size == 1 and not is_windowed and not is_bidirectional
        step = query_len if is_causal else max(1, _MAX_MASK_ELEMENTS // most_keys)
        if is_windowed:
            step = min(step, max(window, page_size))
        for first in range(0, query_len, step):
            last = min(first + step, query_len)
            lowest, highest = prefix + first, prefix + last - 1
            if is_bidirectional:
                lowest = highest = seq_len - 1
            length = min(visible_length(highest, block_size), seq_len)
            seen = metadata.first_visible(lowest)
            first_page = seen // page_size
            mask = None
            if not is_causal and (lowest < highest or seen % page_size):
                positions = torch.arange(length, device=page_table.device)
                queries = positions[prefix + first : prefix + last].unsqueeze(1)
                if is_bidirectional:
                    queries = torch.full_like(queries, highest)
                positions = positions[first_page * page_size :]
                mask = causal_mask(positions, (queries // block_size + 1) * block_size)
                if window:
                    starts = window_start(queries, window, metadata.is_chunked)
                    mask.masked_fill_(positions < starts, float("-inf"))
            pieces.append(
                ExtendPiece(
                    query_start=row_start + first,
                    query_stop=row_start + last,
                    pages=page_table[row, first_page : -(-length // page_size)].long(),
                    length=length - first_page * page_size,
                    is_causal=is_causal,
                    mask=mask,
                )
            )
        row_start += query_len
    return tuple(pieces)


def visible_length(position: int, block_size: int) -> int:
    """Number of positions that a query at `position` attends to: all positions up to the end of its
    block."""
    return (position // block_size + 1) * block_size


def causal_mask(positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Mask in fp32: 0 for positions below their row's number of visible positions, otherwise
    -inf."""
    hidden = positions >= visible
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
