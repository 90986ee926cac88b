"""Lookup and logits over a token table, plain or sharded by rows over ranks, and ordered sums.

If the table is sharded over tensor-parallel ranks, each computes the logits of its rows and never
all of them. V need not be divisible by the ranks.

Sums of rows by cell, and the backward pass of rows by index, add in one order on every device and
number of threads. On a GPU `index_add` adds in the order in which its threads arrive, and so does
the backward pass of `x[index]` on several threads of a CPU: tensor-parallel ranks, for example,
would drift apart. The sums here are of bags of rows, each added by one thread from first to last:
on one thread of a CPU they equal torch's operations bit by bit.

Legend: T tokens or rows, C cells, N targets or indices, H width of the states, V rows of the table.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cellmill.parallel.torch_private import is_dtensor

if TYPE_CHECKING:  # takes half a second to import; where there is a DTensor, it has been
    import torch.distributed.tensor


def embed_tokens(tokens: Tensor, table: Tensor) -> Tensor:
    """(T,) int64 and (V, H) -> (T, H), replicated."""
    if not is_dtensor(table):
        return F.embedding(tokens, table)

    def look_up(rows: Tensor, is_local: Tensor, local_table: Tensor) -> Tensor:
        return F.embedding(rows, local_table) * is_local[:, None]

    return _sum_over_ranks(tokens, table, len(tokens), look_up)


def embed_bags(tokens: Tensor, values: Tensor, cu_seqlens: Tensor, table: Tensor) -> Tensor:
    """(T,) int64, (T,), (C + 1,), (V, H) -> (C, H), replicated.

    The result is the sum of value times embedding over a cell's tokens.
    """

    def add_up(rows: Tensor, values: Tensor, table: Tensor) -> Tensor:
        return _sum_bags(table, rows, cu_seqlens.to(rows.dtype), values.to(table.dtype))

    if not is_dtensor(table):
        return add_up(tokens, values, table)

    def look_up(rows: Tensor, is_local: Tensor, local_table: Tensor) -> Tensor:
        return add_up(rows, values * is_local, local_table)

    return _sum_over_ranks(tokens, table, len(cu_seqlens) - 1, look_up)


def _sum_over_ranks(
    tokens: Tensor,
    table: "torch.distributed.tensor.DTensor",
    n: int,
    look_up: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the sum over ranks, (n, H), of what each looks up in its rows of a sharded table.

    `look_up` takes row in the local table and whether the token is there, (T,) each, and the table.
    """
    local_table = table.to_local()
    rows = tokens - first_row(table)
    is_local = (rows >= 0) & (rows < len(local_table))
    if len(local_table):
        found = look_up(rows.clamp(0, len(local_table) - 1), is_local, local_table)
    else:  # fewer table rows than ranks
        found = local_table.new_zeros(n, local_table.shape[1]) + local_table.sum()
    dt = torch.distributed.tensor
    part = dt.DTensor.from_local(found, table.device_mesh, [dt.Partial()])
    return part.redistribute(placements=[dt.Replicate()]).to_local()


def token_logits(states: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """(N, H), (V, H) and (V,) -> (N, V) float32; a DTensor sharded along V if the table is."""
    if not is_dtensor(table):
        return F.linear(states, table.to(states.dtype), bias.to(states.dtype)).float()
    states, rows, bias = to_local_rows(states, table, bias)
    logits = F.linear(states, rows.to(states.dtype), bias.to(states.dtype)).float()
    shape = torch.Size((len(states), len(table)))
    dt = torch.distributed.tensor
    return dt.DTensor.from_local(
        logits, table.device_mesh, [dt.Shard(1)], shape=shape, stride=(len(table), 1)
    )


def to_local_rows(
    states: Tensor, table: "torch.distributed.tensor.DTensor", *vectors: Tensor
) -> tuple[Tensor, ...]:
    """Return states (N, H), and this rank's rows of the table and of `vectors` (V,), as plain tensors."""
    mesh = table.device_mesh
    dt = torch.distributed.tensor
    whole = [dt.Replicate()]
    # each rank's rows contribute a partial gradient of the replicated states
    states = dt.DTensor.from_local(states, mesh, whole).to_local(grad_placements=[dt.Partial()])
    local_vectors = []
    for vector in vectors:
        sharded = dt.DTensor.from_local(vector, mesh, whole).redistribute(placements=[dt.Shard(0)])
        local_vectors.append(sharded.to_local())
    return states, table.to_local(), *local_vectors


def first_row(table: "torch.distributed.tensor.DTensor") -> int:
    """Return the index of this rank's first row.

    torch gives each rank ceil(V / ranks) rows, and fewer to the last.
    """
    mesh = table.device_mesh
    return -(-len(table) // mesh.size()) * mesh.get_local_rank()


def segment_sum(rows: Tensor, cell: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of each cell's rows: (T, …) -> (C, …), zeros for a cell without rows.

    `cell` (T,) int64, ascending, is the cell of each row; `starts` (C + 1,) are the first row of
    each cell, and T.
    """
    flat = rows[:, None] if rows.ndim == 1 else rows.flatten(1)
    sums: Tensor = _SegmentSum.apply(flat, cell, starts)
    return sums.reshape(len(starts) - 1, *rows.shape[1:])


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]`: (C, H) and (N,) int64, in any order and with repetitions, -> (N, H)."""
    return _RowsAt.apply(rows, index)


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cell: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(cell)
        return _sum_bags(rows, torch.arange(len(rows), device=rows.device), starts.long())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (cell,) = ctx.saved_tensors
        return grad.index_select(0, cell), None, None


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        ascending, order = index.sort(stable=True)
        starts = torch.searchsorted(ascending, torch.arange(ctx.n_rows + 1, device=index.device))
        return _sum_bags(grad.float(), order, starts).to(grad.dtype), None


def _sum_bags(
    rows: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Return sums of the rows `order[starts[c]:starts[c + 1]]`, times `weights`, for each c, (C, H)."""
    return F.embedding_bag(
        order, rows, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
