"""Tensor parallel: modules sharded over the mesh axis `tp`, by the names and styles of a family's plan.

Ranks of one `tp` group read the same cells. Between two sharded matrices activations are replicated, or with sequence
parallel sharded by tokens, whose number must then be divisible by tp (`models.batch.padded`). Applied first:
recomputation and FSDP2 wrap around it. Modules take and return plain tensors; parameters of sharded modules, and
buffers of these modules, are DTensors.
"""

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

from cellmill.config.parallel import Parallel
from cellmill.parallel.mesh import Mesh

Style = Literal["columns", "rows", "vocabulary", "norm", "enter", "leave"]
"""Sharding of one module.

columns
    A linear layer sharded by outputs: by whole heads, or by feed-forward width.
rows
    The linear layer after it, sharded by inputs; its outputs are summed over ranks.
vocabulary
    An embedding sharded by tokens of the vocabulary, to be read through `parallel.vocab_parallel`.
norm
    A replicated module between two sharded ones: with sequence parallel it sees this rank's tokens.
enter
    A module that returns its input, (tokens, …): with sequence parallel, this rank's share of the tokens.
leave
    The first module that needs all tokens again.
"""


def apply_tensor_parallel(model: nn.Module, styles: Mapping[str, Style], parallel: Parallel, mesh: Mesh) -> None:
    """Shard the modules that `styles` names (`*` is any block) over the axis `tp`. In place, also on the meta device.

    tp = 1 leaves the model as it is.
    """
    if parallel.tp == 1:
        return
    known = _sharded_tokens() if parallel.sequence_parallel else _replicated_tokens()
    here = {name for name, _ in model.named_children()}  # a pipeline stage lacks some
    plan = {name: known[style] for name, style in styles.items() if style in known and name.split(".")[0] in here}
    parallelize_module(model, mesh.devices["tp"], plan, src_data_rank=None)


def _replicated_tokens() -> dict[Style, ParallelStyle]:
    return {"columns": ColwiseParallel(), "rows": RowwiseParallel(), "vocabulary": _Vocabulary()}


def _sharded_tokens() -> dict[Style, ParallelStyle]:
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
    """Row-sharded embedding, read through `parallel.vocab_parallel`: DTensor's own lookup gives a full gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _shard_rows)


def _shard_rows(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(sharded))
