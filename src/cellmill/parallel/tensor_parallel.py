"""Tensor parallel: matrices cut over the axis `tp`, by names that a family gives, with torch's own styles.

Processes of one `tp` group take the same cells. Between two cut matrices each has what all have, or with sequence
parallel its share of the tokens, which must then be a multiple of the group's size (`models.batch.padded`). Applied
first: recomputation and FSDP2 go around it. Modules take and give plain tensors; only parameters are DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from cellmill.config.run import Parallel
from cellmill.parallel.mesh import Mesh

Style = Literal["columns", "rows", "vocabulary", "norm", "enter", "leave"]
"""What becomes of a module.

columns
    A linear layer whose outputs are cut: whole heads, or a part of the feed-forward width.
rows
    The linear layer after it, whose inputs are cut; what it gives is summed over the processes.
vocabulary
    An embedding cut by tokens of the vocabulary; it is read by `parallel.vocabulary`.
norm
    Between two cut matrices: with sequence parallel, over this process's tokens.
enter
    A module that hands on what it is given, (tokens, …): with sequence parallel, each process's share of it.
leave
    The first module that needs all tokens again.
"""


def apply_tensor_parallel(model: nn.Module, styles: Mapping[str, Style], parallel: Parallel, mesh: Mesh) -> None:
    """Cuts the modules that `styles` names (`*` is any block) over the axis `tp`. In place, on the meta device too.

    tp = 1 leaves the model as it is.
    """
    if parallel.tp == 1:
        return
    known = _tokens_shared() if parallel.sequence_parallel else _tokens_whole()
    here = {name for name, _ in model.named_children()}  # a stage of a pipeline has not all of them
    plan = {name: known[style] for name, style in styles.items() if style in known and name.split(".")[0] in here}
    parallelize_module(model, mesh.devices["tp"], plan, src_data_rank=None)


def _tokens_whole() -> dict[Style, ParallelStyle]:
    return {"columns": ColwiseParallel(), "rows": RowwiseParallel(), "vocabulary": _Vocabulary()}


def _tokens_shared() -> dict[Style, ParallelStyle]:
    share, whole = Shard(0), Replicate()
    return {
        "columns": ColwiseParallel(input_layouts=share),
        "rows": RowwiseParallel(output_layouts=share),
        "vocabulary": _Vocabulary(),
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "enter": PrepareModuleOutput(output_layouts=(whole,), desired_output_layouts=(share,)),
        "leave": PrepareModuleInput(input_layouts=(share,), desired_input_layouts=(whole,), use_local_output=True),
    }


class _Vocabulary(ParallelStyle):
    """Cuts an embedding's rows. What reads it does so by `parallel.vocabulary`: DTensor's own gradient is whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _cut_rows)


def _cut_rows(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        cut = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(cut))
