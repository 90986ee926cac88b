"""Losses over all cells of a global batch, exact in every layout and however it is cut into micro-batches.

Gradients are accumulated over micro-batches, so a loss that couples cells, such as one of a covariance, cannot be taken
batch by batch. A step whose objective has `n_sums` therefore runs twice: a forward pass without gradients adds up the
objective's `sums`, vectors of K numbers, over micro-batches and ranks; in the ordinary pass each micro-batch knows
these totals, and so the gradient of the loss with respect to its own sums. Dropout is keyed: both passes see the same
numbers.

Anything that adds up over cells can be a sum: moments, or a table of all cells' vectors, to which each cell adds its
own row. Cost: a forward pass without the objective's heads, and one all-reduce of K float64.
"""

from dataclasses import replace
from typing import Any

import torch

from cellmill.models.family import Model
from cellmill.parallel.mesh import Mesh
from cellmill.parallel.pipeline import PipelineModel
from cellmill.parallel.pipeline_stages import PipelineStages
from cellmill.parallel.step import ParallelModel


def with_totals(
    model: Model | PipelineStages, parallel_model: ParallelModel | PipelineModel, prepared: list[Any], mesh: Mesh
) -> list[Any]:
    """Return a step's micro-batches with the `totals` of the global batch, if the objective needs them.

    Collective: every rank, with the same number of micro-batches.
    """
    staged = isinstance(model, PipelineStages)
    last: Any = model.last if staged else model
    n_sums = (model.parts[0] if staged else model).objective.n_sums
    if not n_sums:
        return prepared
    kept: list[torch.Tensor] = []
    if last is not None:
        last.kept_sums = kept
    try:
        parallel_model.loss(prepared)
    finally:
        if last is not None:
            last.kept_sums = None
    if last is not None and len(kept) != len(prepared):
        raise TypeError(f"{type(last).__name__}.finish keeps no sums, which its objective needs")
    # the last pipeline stage alone has sums, and `Mesh.sum` divides by the number of stages
    sums = torch.stack(kept).sum(0) * mesh.pp.size() if kept else torch.zeros(n_sums, dtype=torch.float64)
    totals = mesh.sum(sums.to(mesh.device))
    return [replace(batch, totals=totals) for batch in prepared]
