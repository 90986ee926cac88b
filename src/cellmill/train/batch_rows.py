"""Losses over all cells of a global batch, exact in every layout and any cut into micro-batches.

A loss that couples cells, such as a covariance or a contrast of each cell with all others, cannot
be computed batch by batch. A step whose objective has `coupled_widths` therefore runs twice. A forward
pass without gradients collects the objective's `coupled_rows`, vectors of cells, of all micro-batches and
ranks in tables. Every rank has them all, and computes their loss and its gradient. In the ordinary pass
each micro-batch adds the product of its rows and their part of this gradient (`RowShare`): by the chain
rule gradients of parameters add up to those of the whole batch. Dropout is keyed, so both passes have
the same rows.

Each rank has global_batch / dp_world slots; those without a cell are rows of zeros. Cost: a forward
pass without the objective's heads, and one all-reduce of global_batch * width float32 per table,
which the plan does not count.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cellmill.models.family import Model
from cellmill.models.objective import Objective, RowShare
from cellmill.parallel.mesh import Mesh, PipelineStages, last_part
from cellmill.parallel.step import StepModel

Rows = tuple[Tensor, ...]  # rows of a micro-batch in each table


def with_shares(
    model: Model | PipelineStages,
    parallel_model: StepModel,
    mesh: Mesh,
    global_batch: int,
    prepared: list[Any],
) -> list[Any]:
    """Return a step's micro-batches with their `shares`, if the objective couples cells. Collective."""
    objective = model.objective
    if not objective.coupled_widths:
        return prepared
    last = last_part(model)
    local_rows = list[Rows]()
    slots = global_batch // mesh.dp_world
    if last is not None:
        last.kept_rows = local_rows
    try:
        parallel_model.loss(prepared)
    finally:
        if last is not None:
            last.kept_rows = None
    assert last is None or len(local_rows) == len(prepared), (
        f"{type(last).__name__}.finish keeps no rows for its objective"
    )
    tables = []
    first_row = mesh.dp_rank * slots
    for index, width in enumerate(objective.coupled_widths):
        table = torch.zeros(slots * mesh.dp_world, width, device=mesh.device)
        if local_rows:
            rows = torch.cat([rows[index] for rows in local_rows])
            assert len(rows) <= slots, f"{len(rows)} rows for {slots} cells"
            # only the last pipeline stage has rows, and `Mesh.sum` divides by the number of stages
            table[first_row : first_row + len(rows)] = rows.float() * mesh.pp.size()
        tables.append(mesh.sum(table))
    if not local_rows:
        return prepared  # only the last pipeline stage computes the loss
    shares = compute_shares(objective, tables, local_rows, first_row)
    return [replace(batch, shares=part) for batch, part in zip(prepared, shares)]


def compute_shares(
    objective: Objective, tables: Sequence[Tensor], rows: Sequence[Rows], first_row: int
) -> list[tuple[RowShare, ...]]:
    """Compute the shares of each micro-batch, one per table.

    `rows` of all micro-batches are in the tables one after another, from row `first_row` on.
    """
    with torch.enable_grad():
        leaves = [table.detach().requires_grad_() for table in tables]
        losses = objective.loss_of_coupled_rows(*leaves)
        total = torch.stack([loss.double() for loss in losses]).sum()
        gradients = torch.autograd.grad(total, leaves)
    by_table = []
    for index, (table, loss, gradient) in enumerate(zip(tables, losses, gradients)):
        loss_per_row = loss.detach() / (table[:, 0] != 0).sum().clamp(min=1)
        sizes = [len(batch_rows[index]) for batch_rows in rows]
        parts = gradient[first_row : first_row + sum(sizes)].split(sizes)
        by_table.append([RowShare(loss_per_row * len(part), part) for part in parts])
    return list(zip(*by_table))
