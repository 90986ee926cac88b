"""Forward and backward of one optimizer step, without a pipeline, and clipping of gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cellmill.config.parallel import Parallel
from cellmill.parallel.apply import COMPUTE_DTYPE
from cellmill.parallel.mesh import Mesh, get_mesh


class StepModel(nn.Module, ABC):
    """Losses and gradients of one optimizer step of a model in its layout."""

    def __init__(self, model: nn.Module, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__()
        self.device = mesh.device
        self.precision = parallel.precision
        self.token_multiple = parallel.tp if parallel.sequence_parallel else 1
        self.autocast_dtype = COMPUTE_DTYPE.get(parallel.precision)
        """dtype of autocast, which keeps the residual stream in float32; FSDP2 casts by itself."""
        if isinstance(model, FSDPModule):
            self.autocast_dtype = None

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @abstractmethod
    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        """Return the padded tokens of each micro-batch: divisible by tp with sequence parallel."""

    @abstractmethod
    def loss(self, micro_batches: Sequence[Any]) -> Tensor:
        """Return the loss summed over this rank's micro-batches, float64, () or (parts,).

        Collective over all ranks.
        """

    @abstractmethod
    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        targets: Tensor,
        factor: Tensor | float = 1.0,
    ) -> Tensor:
        """Accumulate the gradients of a step's loss, and return this rank's share of it, float64.

        The loss is the sum over micro-batches divided by the global `targets`; `factor` multiplies
        only the gradients. If the objective has parts, `targets`, `factor` and the result are
        (parts,), and gradients are those of the sum. Collective over all ranks, with the same
        number of micro-batches.
        """


class ParallelModel(StepModel):
    """Step of a plain, DDP or FSDP2 model, after `parallelize` and `materialize`."""

    def __init__(self, model: nn.Module, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__(model, parallel, mesh)
        self.core = model
        self.scale = 1.0
        device = mesh.device
        self.reduces_each = parallel.reduces_each_micro_batch
        self.outer: nn.Module = model
        if parallel.strategy == "ddp" and mesh.dp_world > 1 and mesh.model_parallel_size == 1:
            self.outer = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=mesh.dp_group,
                gradient_as_bucket_view=True,
            )
            # buffers are constants, equal on every rank; torch renamed the argument in 2.13, not the
            # attribute
            self.outer.broadcast_buffers = False
            self.scale = float(mesh.dp_world)  # DDP averages; gradients must be sums

    def forward(self, prepared: Any) -> Tensor:
        """Return the summed loss of a micro-batch, float32, () or (parts,)."""
        with self.autocast():
            return self.outer(prepared)

    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        return [-(-n // self.token_multiple) * self.token_multiple for n in tokens]

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[Any]) -> Tensor:
        return torch.stack([self(prepared).double() for prepared in micro_batches]).sum(0)

    def forward_backward(
        self,
        micro_batches: Sequence[Any],
        targets: Tensor,
        factor: Tensor | float = 1.0,
    ) -> Tensor:
        """Accumulate gradients, which ranks reduce with the last micro-batch.

        With `parallel.gradient_reduction: micro_batch` they reduce them with each micro-batch.
        """
        total = torch.zeros_like(targets, dtype=torch.float64)
        for index, prepared in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            if isinstance(self.core, FSDPModule):
                self.core.set_is_last_backward(is_last or self.reduces_each)
                self.core.set_requires_gradient_sync(is_last or self.reduces_each)
                self.core.set_requires_all_reduce(is_last)
            context: AbstractContextManager[Any] = nullcontext()
            if isinstance(self.outer, DistributedDataParallel) and not is_last:
                context = self.outer.no_sync()
            with context:
                loss = self(prepared)
                (loss * (self.scale * factor / targets)).sum().backward()
            total += loss.detach()
        return total / targets


def clip_grad_norm(model: nn.Module, max_norm: float | None, pipeline: DeviceMesh) -> Tensor:
    """Scale this rank's gradients so that their 2-norm over all ranks is at most `max_norm`.

    Return the norm before clipping, a scalar on the parameters' device; with `max_norm` None
    gradients stay as they are. `pipeline` is the mesh axis of the ranks that hold other stages.
    Collective over all ranks, also over ranks whose parameters are all frozen.
    """
    tied: frozenset[int] = getattr(model, "tied", frozenset())
    # one group for each mesh: torch's norm takes no list of tensors on different meshes
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            placements = cast(DTensor, parameter).placements
            if gradient.placements != placements:
                # the gradient of a norm over some of the tokens is a partial sum
                parameter.grad = gradient.redistribute(placements=placements)
        groups.setdefault(get_mesh(parameter), []).append(parameter)
    norms = []
    for group in groups.values():
        gradients = [
            parameter.grad
            for parameter in group
            if parameter.grad is not None and id(parameter) not in tied
        ]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        # a DTensor's norm is a partial sum until it is reduced
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:  # a pipeline stage without trained parameters
        norms = [torch.zeros((), device=next(model.parameters()).device)]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipeline.size() > 1:
        squares = total.square()
        dist.all_reduce(squares, group=pipeline.get_group())
        total = squares.sqrt()
    if max_norm is not None:
        for group in groups.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=True)
    return total
