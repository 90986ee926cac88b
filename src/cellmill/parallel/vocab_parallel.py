"""Embedding lookup and logits over a token table, plain or sharded by rows over tensor-parallel
ranks; ordered sums.

Sharded, each rank computes the logits of its own rows and never all of them. V need not be
divisible by the ranks.

Sums of rows by cell, and the backward pass of rows by index, add in one order on every device and
number of threads. On a GPU `index_add` adds in the order in which its threads arrive, and so does
the backward pass of `x[index]` on several threads of a CPU: tensor-parallel ranks, for one, would
drift apart. The sums here are of bags of rows, each added by one thread from first to last: on one
thread of a CPU they equal torch's operations bit by bit.

Legend: T tokens or rows, C cells, N targets or indices, H hidden, V rows of the table.
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
    return _over_ranks(
        tokens,
        table,
        len(tokens),
        lambda rows, inside, own: F.embedding(rows, own) * inside[:, None],
    )


def embed_bags(tokens: Tensor, values: Tensor, cu_seqlens: Tensor, table: Tensor) -> Tensor:
    """(T,) int64, (T,), (C + 1,), (V, H) -> (C, H), replicated: sums of value times embedding over
    a cell's tokens.
    """

    def sums(rows: Tensor, values: Tensor, table: Tensor) -> Tensor:
        return _bags(table, rows, cu_seqlens.to(rows.dtype), values.to(table.dtype))

    if not is_dtensor(table):
        return sums(tokens, values, table)
    n_cells = len(cu_seqlens) - 1
    return _over_ranks(
        tokens, table, n_cells, lambda rows, inside, own: sums(rows, values * inside, own)
    )


def _over_ranks(
    tokens: Tensor,
    table: "torch.distributed.tensor.DTensor",
    n: int,
    read: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Sum (n, H) over the ranks of a sharded table, each reading its own rows: `read(rows, inside,
    own)`.
    """
    own = table.to_local()
    rows = tokens - first_row(table)
    inside = (rows >= 0) & (rows < len(own))
    if len(own):
        found = read(rows.clamp(0, len(own) - 1), inside, own)
    else:  # fewer table rows than ranks
        found = own.new_zeros(n, own.shape[1]) + own.sum()
    dt = torch.distributed.tensor
    part = dt.DTensor.from_local(found, table.device_mesh, [dt.Partial()])
    return part.redistribute(placements=[dt.Replicate()]).to_local()


def token_logits(states: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """(N, H), (V, H) and (V,) -> (N, V) float32; a DTensor sharded along V where the table is
    sharded.
    """
    if not is_dtensor(table):
        return F.linear(states, table.to(states.dtype), bias.to(states.dtype)).float()
    states, rows, bias = own_rows(states, table, bias)
    own = F.linear(states, rows.to(states.dtype), bias.to(states.dtype)).float()
    whole = torch.Size((len(states), len(table)))
    dt = torch.distributed.tensor
    return dt.DTensor.from_local(
        own, table.device_mesh, [dt.Shard(1)], shape=whole, stride=(whole[1], 1)
    )


def own_rows(
    states: Tensor, table: "torch.distributed.tensor.DTensor", *vectors: Tensor
) -> tuple[Tensor, ...]:
    """Return (N, H) states, (local V, H) table and (local V,) parts of `vectors` (bias, …) as plain
    tensors.
    """
    mesh = table.device_mesh
    dt = torch.distributed.tensor
    share = [dt.Shard(0)]
    whole = [dt.Replicate()]
    # each rank's rows contribute a partial gradient of the replicated states
    states = dt.DTensor.from_local(states, mesh, whole).to_local(grad_placements=[dt.Partial()])
    own = (
        dt.DTensor.from_local(x, mesh, whole).redistribute(placements=share).to_local()
        for x in vectors
    )
    return states, table.to_local(), *own


def first_row(table: "torch.distributed.tensor.DTensor") -> int:
    """Return the index of this rank's first row, as torch shards: ceil(V / ranks) rows each, fewer
    on the last.
    """
    mesh = table.device_mesh
    return -(-len(table) // mesh.size()) * mesh.get_local_rank()


def segment_sum(rows: Tensor, cell: Tensor, starts: Tensor) -> Tensor:
    """Sum the rows of each cell: (T, …) -> (C, …), of the dtype of `rows`; zeros for a cell without
    rows.

    `cell` (T,) int64, ascending, is the cell of each row; `starts` (C + 1,) the first row of each
    cell, and T.
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
        return _bags(rows, torch.arange(len(rows), device=rows.device), starts.long())

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
        return _bags(grad.float(), order, starts).to(grad.dtype), None


def _bags(
    rows: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Sums of the rows `order[starts[c]:starts[c + 1]]`, times `weights`, for each c, (C, H)."""
    return F.embedding_bag(
        order, rows, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
