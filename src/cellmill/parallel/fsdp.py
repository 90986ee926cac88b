"""A model laid out over a mesh by DistributedDataParallel or FSDP2, block by block.

Gradients are *summed* over data-parallel processes, never averaged: the loss is divided by the global count of its
targets before the backward pass, which is exact however unevenly targets fall on processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cellmill.config.run import Parallel
from cellmill.parallel.mesh import Mesh

RESHARD = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "NO_SHARD": False}

LOW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def apply_fsdp(model: nn.Module, blocks: str, parallel: Parallel, mesh: Mesh) -> None:
    """Applies FSDP2 to each block and then to the root. In place, on the meta device or after.

    One process alone is left as it is: there is nothing to shard. So is ddp, but with tensor parallel, whose tensors
    DistributedDataParallel does not take: FSDP2 that shards nothing stands in for it.
    """
    if mesh.dp_world == 1 or (parallel.strategy == "ddp" and mesh.model_parallel_size == 1):
        return
    policy = MixedPrecisionPolicy()
    if parallel.low:
        policy = MixedPrecisionPolicy(param_dtype=LOW[parallel.precision], reduce_dtype=torch.float32)
    # a pipeline needs a stage's weights for many micro-batches at once: gathered anew for each they would cost too much
    again = parallel.strategy == "fsdp" and RESHARD[parallel.sharding_strategy] and parallel.pp == 1
    offload = OffloadPolicy()
    if parallel.cpu_offload == "full":
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    given = {"mesh": mesh.fsdp, "mp_policy": policy, "offload_policy": offload}
    for block in cast(nn.ModuleList, model.get_submodule(blocks)):
        fully_shard(block, reshard_after_forward=again, **given)
    # the root's parameters are wanted again as soon as the backward pass begins
    fully_shard(model, reshard_after_forward=False, **given)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        if mesh.devices.device_type == "cpu":  # gloo has no PREMUL_SUM
            module.set_force_sum_reduction_for_comms(True)


class ParallelModel(nn.Module):
    """What the loop calls: the laid-out model, with the same manners in every layout.

    Parameters
    ----------
    model
        After `apply_fsdp`, materialised and initialised.
    """

    def __init__(self, model: nn.Module, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__()
        self.core = model
        self.scale = 1.0
        self.token_multiple = parallel.tp if parallel.sequence_parallel else 1
        self.outer: nn.Module = model
        device = mesh.device
        if parallel.strategy == "ddp" and mesh.dp_world > 1 and mesh.model_parallel_size == 1:
            ids = [device.index] if device.type == "cuda" else None
            self.outer = DistributedDataParallel(
                model, device_ids=ids, process_group=mesh.dp_group, gradient_as_bucket_view=True
            )
            self.scale = float(mesh.dp_world)  # DDP averages; undone here so that gradients are sums
        sharded = isinstance(model, FSDPModule)
        self.precision = parallel.precision
        self.low = None if sharded else LOW.get(parallel.precision)
        self.device_type = device.type

    def forward(self, prepared: object) -> torch.Tensor:
        """The model's loss sum over a micro-batch, a float32 scalar."""
        with nullcontext() if self.low is None else torch.autocast(self.device_type, self.low):
            return self.outer(prepared)

    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        """To how many tokens each micro-batch of a step is padded: what sequence parallel must share is divisible."""
        return [-(-n // self.token_multiple) * self.token_multiple for n in tokens]

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[object]) -> torch.Tensor:
        """Loss summed over this process's micro-batches, a float64 scalar. Collective: every rank, as many."""
        return torch.stack([self(prepared).double() for prepared in micro_batches]).sum()

    def forward_backward(
        self, micro_batches: Sequence[object], targets: torch.Tensor, factor: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """Gradients of a step's loss: the sum over this process's micro-batches, divided by all `targets` of the step.

        Returns that share of the loss, a float64 scalar; `factor` multiplies the gradients alone. They are reduced over
        processes with the last micro-batch only. Collective: every rank, with as many micro-batches.
        """
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        for index, prepared in enumerate(micro_batches):
            with self._micro_step(last=index == len(micro_batches) - 1):
                loss = self(prepared)
                (loss * (self.scale * factor / targets)).backward()
            total += loss.detach()
        return total / targets

    @contextmanager
    def _micro_step(self, last: bool) -> Iterator[None]:
        if isinstance(self.outer, DistributedDataParallel) and not last:
            with self.outer.no_sync():
                yield
            return
        if isinstance(self.core, FSDPModule):
            self.core.set_is_last_backward(last)
            self.core.set_requires_gradient_sync(last)
        yield


def reshard(model: nn.Module) -> None:
    """Lets go of weights that FSDP gathered and a pass without a backward pass left whole. No communication.

    Before that `named_parameters` gives the whole ones, which no optimizer knows.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
