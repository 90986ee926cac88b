"""Forward and backward of one optimizer step: the interface, and every layout without a pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from cellmill.config.parallel import Parallel
from cellmill.parallel.fsdp import COMPUTE_DTYPE
from cellmill.parallel.mesh import Mesh


class StepModel(nn.Module, ABC):
    """Losses and gradients of one optimizer step of a model in its layout."""

    precision: str

    @abstractmethod
    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        """Return the padded tokens of each micro-batch of a step: divisible by tp with sequence parallel."""

    @abstractmethod
    def loss(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Return the loss summed over this rank's micro-batches, a float64 scalar or (parts,).

        Collective: every rank, with the same number of micro-batches.
        """

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[Any], targets: torch.Tensor, factor: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """Accumulate gradients of a step's loss: the sum over micro-batches divided by the step's global `targets`.

        Returns this rank's share of the loss, a float64 scalar; `factor` multiplies only the gradients. Of an
        objective with parts, `targets`, `factor` and the result are (parts,), and gradients those of the sum.
        Collective: every rank, with the same number of micro-batches.
        """


class ParallelModel(StepModel):
    """Step of a model that each process has in full or in shards: plain, DistributedDataParallel or FSDP2.

    Parameters
    ----------
    model
        After `parallelize` and `materialize`.
    """

    def __init__(self, model: nn.Module, parallel: Parallel, mesh: Mesh) -> None:
        super().__init__()
        self.core = model
        self.scale = 1.0
        self.token_multiple = parallel.tp if parallel.sequence_parallel else 1
        self.outer: nn.Module = model
        device = mesh.device
        if parallel.strategy == "ddp" and mesh.dp_world > 1 and mesh.model_parallel_size == 1:
            self.outer = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=mesh.dp_group,
                gradient_as_bucket_view=True,
            )
            # they are constants, equal on every rank; torch renamed the argument in 2.13, and kept the attribute
            self.outer.broadcast_buffers = False
            self.scale = float(mesh.dp_world)  # DDP averages; gradients must be sums
        sharded = isinstance(model, FSDPModule)
        self.reduces_each = parallel.reduces_each_micro_batch
        self.precision = parallel.precision
        self.autocast_dtype = None if sharded else COMPUTE_DTYPE.get(parallel.precision)
        self.device_type = device.type

    def forward(self, prepared: Any) -> torch.Tensor:
        """Return the summed loss of a micro-batch, a float32 scalar, or (parts,) of an objective with parts."""
        with nullcontext() if self.autocast_dtype is None else torch.autocast(self.device_type, self.autocast_dtype):
            return self.outer(prepared)

    def padded_lengths(self, tokens: Sequence[int]) -> list[int]:
        """Return each micro-batch's tokens, rounded up."""
        return [-(-n // self.token_multiple) * self.token_multiple for n in tokens]

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Return the sum over micro-batches, one after another."""
        return torch.stack([self(prepared).double() for prepared in micro_batches]).sum(0)

    def forward_backward(
        self, micro_batches: Sequence[Any], targets: torch.Tensor, factor: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """Accumulate gradients; ranks reduce them with the last micro-batch, or `parallel.gradient_reduction`: each."""
        total = torch.zeros_like(targets, dtype=torch.float64)
        for index, prepared in enumerate(micro_batches):
            with self._micro_step(last=index == len(micro_batches) - 1):
                loss = self(prepared)
                (loss * (self.scale * factor / targets)).sum().backward()
            total += loss.detach()
        return total / targets

    @contextmanager
    def _micro_step(self, last: bool) -> Iterator[None]:
        if isinstance(self.outer, DistributedDataParallel) and not last:
            with self.outer.no_sync():
                yield
            return
        if isinstance(self.core, FSDPModule):
            self.core.set_is_last_backward(last or self.reduces_each)
            self.core.set_requires_gradient_sync(last or self.reduces_each)
            self.core.set_requires_all_reduce(last)
        yield
