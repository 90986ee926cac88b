"""A model laid out over a mesh: activation checkpointing, then DistributedDataParallel or FSDP2, block by block.

Gradients are *summed* over data-parallel processes, never averaged: the loss is divided by the global count of its
targets before the backward pass, which is exact however unevenly targets fall on processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cellmill.config.run import Parallel
from cellmill.parallel.mesh import Mesh

RESHARD = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "NO_SHARD": False}


def checkpoint_activations(model: nn.Module, blocks: str) -> None:
    """Makes each block of the ModuleList called `blocks` recompute its activations. In place; names stay the same."""
    modules = cast(nn.ModuleList, model.get_submodule(blocks))
    for index, block in enumerate(modules):
        # no RNG state to keep: dropout is keyed by position, so recomputation is exact without it
        modules[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)


def shard(model: nn.Module, blocks: str, parallel: Parallel, mesh: Mesh) -> None:
    """Applies FSDP2 to each block and then to the root. In place, on the meta device or after.

    One process alone is left as it is: there is nothing to shard. So is ddp, but with tensor parallel, whose tensors
    DistributedDataParallel does not take: FSDP2 that shards nothing stands in for it.
    """
    if mesh.dp_world == 1 or (parallel.strategy == "ddp" and mesh.sharers == 1):
        return
    policy = MixedPrecisionPolicy()
    if parallel.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshard = parallel.strategy == "fsdp" and RESHARD[parallel.sharding_strategy]
    for block in cast(nn.ModuleList, model.get_submodule(blocks)):
        fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard)
    # the root's parameters are wanted again as soon as the backward pass begins
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        if mesh.devices.device_type == "cpu":  # gloo has no PREMUL_SUM
            module.set_force_sum_reduction_for_comms(True)


class Replica(nn.Module):
    """What the loop calls: the laid-out model, with the same three manners in every layout.

    Parameters
    ----------
    model
        After `shard`, materialised and initialised.
    """

    def __init__(self, model: nn.Module, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__()
        self.core = model
        self.scale = 1.0
        self.token_multiple = parallel.tp if parallel.sequence_parallel else 1
        self.outer: nn.Module = model
        device = next(model.parameters()).device
        if parallel.strategy == "ddp" and mesh.dp_world > 1 and mesh.sharers == 1:
            ids = [device.index] if device.type == "cuda" else None
            self.outer = DistributedDataParallel(
                model, device_ids=ids, process_group=mesh.dp_group, gradient_as_bucket_view=True
            )
            self.scale = float(mesh.dp_world)  # DDP averages; undone here so that gradients are sums
        sharded = isinstance(model, FSDPModule)
        self.autocast = parallel.precision == "bf16-mixed" and not sharded
        self.device_type = device.type

    def forward(self, *inputs: object) -> torch.Tensor:
        """The model's loss sum, a float32 scalar."""
        with torch.autocast(self.device_type, torch.bfloat16) if self.autocast else nullcontext():
            return self.outer(*inputs)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Gradients are reduced over processes only in the last micro-step of a step."""
        if isinstance(self.outer, DistributedDataParallel) and not last:
            with self.outer.no_sync():
                yield
            return
        if isinstance(self.core, FSDPModule):
            self.core.set_is_last_backward(last)
            self.core.set_requires_gradient_sync(last)
        yield


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
