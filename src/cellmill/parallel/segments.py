"""Sums of rows by cell, and rows by index, whose additions have one order on every device and number of threads.

`index_add` adds on a GPU in the order in which its threads arrive, and so does the backward pass of `x[index]` on
several threads of a CPU. Sums then differ in their last bits from one run to the next, and from one tensor-parallel
rank to another, whose copies of a replicated parameter would drift apart. The sums here are those of bags of rows,
each added by one thread from first to last: on one thread of a CPU they equal those of torch's operations bit by bit.

Legend: T rows, C cells, N indices.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def segment_sum(rows: torch.Tensor, cell: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sum the rows of each cell: (T, …) -> (C, …), of the dtype of `rows`; zeros for a cell without rows.

    Parameters
    ----------
    cell, starts
        (T,) int64, ascending: the cell of each row; and (C + 1,), the first row of each cell, and T.
    """
    flat = rows[:, None] if rows.ndim == 1 else rows.flatten(1)
    sums: torch.Tensor = _SegmentSum.apply(flat, cell, starts)
    return sums.reshape(len(starts) - 1, *rows.shape[1:])


def rows_at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `rows[index]`: (C, H) and (N,) int64, in any order and with repetitions, -> (N, H)."""
    return _RowsAt.apply(rows, index)


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, cell: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cell)
        return _bags(rows, torch.arange(len(rows), device=rows.device), starts.long())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (cell,) = ctx.saved_tensors
        return grad.index_select(0, cell), None, None


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.n_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        ascending, order = index.sort(stable=True)
        starts = torch.searchsorted(ascending, torch.arange(ctx.n_rows + 1, device=index.device))
        return _bags(grad.float(), order, starts).to(grad.dtype), None


def _bags(rows: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sums of the rows `order[starts[c]:starts[c + 1]]` for each c, (C, H)."""
    return F.embedding_bag(order, rows, starts, mode="sum", include_last_offset=True)
