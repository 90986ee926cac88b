"""FSDP2, block by block.

Gradients are *summed* over data-parallel ranks, never averaged: the loss is divided by the global number of targets
before the backward pass, which is exact however unevenly targets fall on ranks.
"""

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from cellmill.config.parallel import Parallel
from cellmill.parallel.mesh import Mesh

COMPUTE_DTYPE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""dtype of forward and backward by `parallel.precision`; float32 is left out, as nothing is cast then."""


def apply_fsdp(model: nn.Module, blocks: str, parallel: Parallel, mesh: Mesh) -> None:
    """Apply FSDP2 to each block of the ModuleList `blocks`, then to the root. In place, also on the meta device.

    A single data-parallel rank is left unwrapped: there is nothing to shard. So is strategy ddp, except with tensor or
    pipeline parallel: DistributedDataParallel takes no DTensors, and FSDP2 that shards nothing replaces it.
    """
    if mesh.dp_world == 1 or (parallel.strategy == "ddp" and mesh.model_parallel_size == 1):
        return
    policy = MixedPrecisionPolicy()
    if parallel.half_precision:
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE[parallel.precision], reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if parallel.cpu_offload == "full":
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    shard = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload)
    for block in cast(nn.ModuleList, model.get_submodule(blocks)):
        shard(block, reshard_after_forward=parallel.reshards_after_forward)
    # the backward pass begins with the root's parameters
    shard(model, reshard_after_forward=False)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # a plain sum: gloo has no PREMUL_SUM, and NCCL's algorithms on switches (NVLS, SHARP) have none either
        module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free gathered weights that a forward pass without a backward pass left unsharded. No communication.

    Until then `named_parameters` yields the unsharded ones, which the optimizer does not know.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
