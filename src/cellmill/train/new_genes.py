"""First rows of genes that the model of `init_from` never saw: the mean of those that it has."""

from pathlib import Path

import torch
import torch.distributed as dist

from cellmill.models.build import ModelSpec, build
from cellmill.models.export import mean_gene_row
from cellmill.models.gene_vectors import TABLE
from cellmill.models.weights_file import WEIGHTS, WeightsFile
from cellmill.parallel.materialize import named_tensors


def mean_gene_rows(spec: ModelSpec, folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the mean row of each tensor of the model `spec` with a row per gene that the model in `folder` has.

    All ranks must call. Rank 0 reads the tables, a piece at a time, and sends the means: the others read their own part
    of the model alone, and all layouts have the same bits. The table of given gene vectors has no mean: a gene without
    a vector has none.
    """
    model, file = build(spec), WeightsFile(folder / WEIGHTS)
    shapes = {
        name: tensor.shape[1:]
        for name, tensor in named_tensors(model)
        if name in model.gene_rows
        and name in file.names
        and name != TABLE
        and file.shape(name)[1:] == tensor.shape[1:]  # `initial_tensors` refuses another width
    }
    if not shapes:
        return {}
    if dist.get_rank() == 0:
        sent = torch.cat([mean_gene_row(folder / WEIGHTS, name).flatten() for name in shapes]).to(device)
    else:
        sent = torch.empty(sum(shape.numel() for shape in shapes.values()), device=device)
    dist.broadcast(sent, 0)
    parts = sent.cpu().split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
