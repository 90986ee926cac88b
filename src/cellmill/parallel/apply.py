"""Every transform that lays a model out over a mesh, in the one order that is correct.

    pipeline -> tensor parallel -> freeze -> compile -> recompute -> FSDP2

Why this order:

- pipeline: the modules of other pipeline stages are dropped before anything shards or wraps them.
- tensor parallel before freeze: SequenceParallel and sharded modules re-create parameters with requires_grad=True.
- freeze before FSDP2 and compile, which record what requires a gradient.
- compile before recompute: the recomputed block runs the compiled methods. Tensor-parallel collectives are traced.
- FSDP2 last: its hooks stay outside of the recomputed block, whose weights they gather for both forward passes.

DistributedDataParallel wraps the result in `parallel.step`, after the parameters have values.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from cellmill.config.parallel import Parallel
from cellmill.parallel.compile_blocks import compile_blocks
from cellmill.parallel.fsdp import apply_fsdp
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import Mesh
from cellmill.parallel.pipeline_stages import keep_stage
from cellmill.parallel.recompute import checkpoint_activations
from cellmill.parallel.tensor_parallel import apply_tensor_parallel


def parallelize(
    model: nn.Module,
    parallel: Parallel,
    mesh: Mesh,
    *,
    stage: int = 0,
    trains: Callable[[str], bool] | None = None,
) -> None:
    """Lay out `model` over `mesh`, in place, on the meta device.

    Parameters
    ----------
    model
        A whole `cellmill.models.family.Model`; its `plan` names what each transform acts on.
    stage
        Pipeline stage to keep; not read without a pipeline.
    trains
        Whether the parameter with this plain name is trained; None trains all.
    """
    plan: Any = model.plan
    if parallel.pp > 1:
        keep_stage(model, stage, parallel.stages)
    apply_tensor_parallel(model, plan.tensor, parallel, mesh)
    if trains is not None:
        freeze(model, trains)
    if parallel.compile:
        compile_blocks(model, plan.blocks, plan.compiled)
    if parallel.activation_checkpointing is not None:
        checkpoint_activations(model, plan.blocks, parallel.activation_checkpointing)
    apply_fsdp(model, plan.blocks, parallel, mesh)


def freeze(model: nn.Module, trains: Callable[[str], bool]) -> None:
    """Turn off the gradient of every parameter that `trains` rejects by its plain name."""
    for name, parameter in model.named_parameters():
        if not trains(plain_name(name)):
            parameter.requires_grad_(False)
