"""Matrices that lie transposed in a flat group of stages 1 and 2, as ZenFlow lays them.

ZenFlow of DeepSpeed 0.17.5 to 0.19.6 flattens every matrix column by column (source: its
``zenflow_utils._flatten_dense_tensors``). Inside one rank's part such a matrix is a strided span;
where a border between parts cuts it, it is put together of rectangles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.fragments import part_starts_bytes
from dist_consolidate.checkpoint.model import Block, FlatGroup, Source


def column_major(group: FlatGroup, offset_numel: int, shape: tuple[int, int]) -> Source:
    """Give the source of a matrix that lies column by column in a flat group.

    Args:
        group: The flat group; its parts follow one another.
        offset_numel: The matrix's first element in their concatenation.
        shape: Rows and columns of the matrix.

    Returns:
        A strided span, or blocks where the matrix lies in several parts.
    """
    width = group.dtype.itemsize_bytes
    starts = [start // width - offset_numel for start in part_starts_bytes(group.parts)]
    stops = [
        start + part.num_bytes // width for start, part in zip(starts, group.parts, strict=True)
    ]
    numel = shape[0] * shape[1]
    touched = [k for k, start in enumerate(starts) if start < numel and stops[k] > 0]
    touched = [k for k in touched if stops[k] > starts[k]]
    rectangles = [
        (rows, columns, _rectangle(group, k, starts[k], rows, columns, shape))
        for rows in _bands(shape, [starts[k] for k in touched])
        for k in touched
        if (columns := _columns(rows[0], starts[k], stops[k], shape))
    ]
    if len(rectangles) == 1:
        return Source("fp32 partition", shape, group.dtype, span=rectangles[0][2])
    blocks = tuple(_block(rows, columns, span, shape) for rows, columns, span in rectangles)
    return Source("fp32 partition", shape, group.dtype, blocks=blocks)


def _bands(shape: tuple[int, int], borders: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut the rows where a border between parts changes the columns that a part holds."""
    num_rows, num_columns = shape
    cuts = {border % num_rows for border in borders if 0 < border < num_rows * num_columns}
    yield from itertools.pairwise(sorted({0, num_rows} | cuts))


def _columns(row: int, start: int, stop: int, shape: tuple[int, int]) -> tuple[int, int] | None:
    """Give the columns of a row whose elements lie in ``[start, stop)`` of the flat matrix."""
    num_rows, num_columns = shape
    first = max(-((row - start) // num_rows), 0)
    behind = min(-((row - stop) // num_rows), num_columns)
    return (first, behind) if first < behind else None


def _rectangle(
    group: FlatGroup,
    part: int,
    start_numel: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    shape: tuple[int, int],
) -> TensorSpan:
    extent, num_rows = group.parts[part], shape[0]
    inside = columns[0] * num_rows + rows[0] - start_numel
    offset_bytes = extent.offset_bytes + inside * group.dtype.itemsize_bytes
    size = (rows[1] - rows[0], columns[1] - columns[0])
    return TensorSpan(extent.file, offset_bytes, group.dtype, size, (1, num_rows))


def _block(
    rows: tuple[int, int], columns: tuple[int, int], span: TensorSpan, shape: tuple[int, int]
) -> Block:
    return Block(
        source=Source("fp32 partition", span.shape, span.dtype, span=span),
        num_runs=span.shape[0],
        run_numel=span.shape[1],
        from_numel=0,
        from_step_numel=span.shape[1],
        to_numel=rows[0] * shape[1] + columns[0],
        to_step_numel=shape[1],
    )
